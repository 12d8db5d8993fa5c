"""Hooks run on each part of a vision-language model, or a warning says that they will not."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

FAMILIES = pytest.mark.parametrize("family", ["gemma3", "mllama", "qwen2_5_vl"])


def changed(module, inputs, output):
    """Scale channels separately, so that the following norm does not cancel it."""
    if isinstance(output, tuple):
        return tuple(changed(module, inputs, x) for x in output)
    return output * torch.linspace(0.5, 1.5, output.shape[-1])


@FAMILIES
def test_a_hook_on_a_part_changes_its_output(family, pair):
    model, call = copy.deepcopy(pair.ours), pair.batch()
    with torch.no_grad():
        plain = model(**call).loss
        parts = [model.vision.encoder.patch_embed, *model.vision.encoder.layers, model.vision.encoder]
        for part in (*parts, model.vision.projector, *model.layers, model.norm):
            handle = part.register_forward_hook(changed)
            assert model(**call).loss != plain, type(part).__name__
            handle.remove()
        assert model(**call).loss == plain


@FAMILIES
def test_backward_hooks_on_the_tower_are_run(family, pair):
    """They get the gradient of its output, and their changes take effect."""
    model, seen = copy.deepcopy(pair.ours), []
    model.vision.encoder.register_full_backward_pre_hook(lambda _, g: (seen.append(g), [0 * x for x in g])[1])
    model(**pair.batch()).loss.backward()
    assert seen[0][0].any()
    assert not any(p.grad.any() for p in model.vision.encoder.parameters() if p.grad is not None)
    assert any(p.grad.any() for p in model.vision.projector.parameters())


@FAMILIES
def test_hooks_on_modules_that_only_hold_others_raise_a_warning(family, pair, hf, tmp_path):
    pair.reference.save_pretrained(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    holder = model.model.language_model
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        with pytest.warns(UserWarning, match="holds .*layers.* never run"):
            getattr(holder, f"register_{kind}")(lambda *_: None).remove()
    for other in (module for module in model.modules() if type(module).__name__ == "Holder"):
        with pytest.raises(NotImplementedError, match="call the model"):
            other(torch.ones(1, 2).long())
