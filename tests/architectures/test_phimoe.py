"""Phi-MoE where it differs from other families: in training, and beyond its original context length."""

from __future__ import annotations

import importlib

import pytest
import torch
from pairs import relative_distance, spec_of

from liger_models.convert.errors import ConfigError
from liger_models.generating.generation import generate
from liger_models.layers.recompute.activation_memory import LEVELS

router = importlib.import_module("liger_models.layers.experts.router")


def in_their_order(logits):
    """The reference draws the last of the uniform numbers twice, and takes the second."""
    first = torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1])
    second = torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1]).uniform_()
    return [first, second]


@pytest.mark.parametrize("changes", [{}, {"input_jitter_noise": 0.0, "output_router_logits": True}], ids=str)
def test_in_training_the_same_draws_give_the_same_results(changes, make_pair, failures, monkeypatch):
    pair = make_pair("phimoe", changes)
    pair.ours.train(), pair.reference.train()
    monkeypatch.setattr(router, "draw_noise", in_their_order)
    for layer in pair.reference.model.layers:
        # A block of the reference adds noise to its input, and its router does so again. Phi-3.5-MoE's own
        # code, with which it was trained, does so once.
        layer.mlp.router.input_jitter_noise = 0.0
    batch = pair.batch()
    torch.manual_seed(3)
    expected = pair.run_reference(**batch)
    torch.manual_seed(3)
    found = pair.run_ours(**batch)
    assert not failures(found.distances(expected))
    assert relative_distance(pair.run_ours(**batch).logits, found.logits) > 0.01  # with other random draws


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_of_activation_memory_has_the_same_draws(level, make_pair):
    model = make_pair("phimoe").ours.train()
    ids = torch.arange(2 * 19).view(2, 19)
    gradients = []
    for each in ("all", level):
        model.set_activation_memory(each)
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_beyond_the_original_length_the_long_factors_are_used(make_pair, failures):
    """As in Phi-3.5-MoE's own code. Transformers 5 does not pass the length of the text to its rotary
    embedding, which then uses the short factors; here the test passes it.
    """
    rope = {**make_pair("phimoe").config["rope_parameters"], "original_max_position_embeddings": 16}
    pair = make_pair("phimoe", {"rope_parameters": rope})
    batch = pair.batch()
    rotation = pair.reference.model.rotary_emb
    short = pair.run_reference(**batch)
    original = rotation.rope_init_fn
    rotation.rope_init_fn = lambda config, *_, **__: original(
        config, None, seq_len=batch["input_ids"].shape[1]
    )
    assert not failures(pair.run_ours(**batch).distances(pair.run_reference(**batch)))
    assert relative_distance(pair.run_ours(**batch).logits, short.logits) > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok must be 2, the only value supported, found 3"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "longrope or default, found linear"),
        ({"long_mscale": 1.3}, r"equal .* found 1\.2 and 1\.3"),
        ({"short_mscale": None}, "found None and 1.2"),
    ],
)
def test_unsupported_settings_are_refused(changes, message, make_pair):
    if "mscale" in next(iter(changes)):
        changes = {"rope_parameters": {**make_pair("phimoe").config["rope_parameters"], **changes}}
    with pytest.raises(ConfigError, match=message):
        spec_of("phimoe", changes)


def test_generation_draws_no_noise_in_training_mode(make_pair):
    model = make_pair("phimoe").ours
    ids = torch.arange(7)[None]
    expected = generate(model.eval(), ids, 12)
    model.train()
    assert torch.equal(generate(model, ids, 12), expected)
    assert all(module.training for module in model.modules())
