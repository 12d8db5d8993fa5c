"""A first step's kernels are compiled from copies without data, and whatever goes wrong there breaks no step
(which launches are compiled ahead: tests/kernels/test_compilation.py).
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import liger_models
from liger_models.architectures import find_architecture
from liger_models.kernels import _ahead
from liger_models.kernels._dispatch import _wait_for
from liger_models.layers.model import first_step


def test_copies_have_no_data_and_share_nothing_with_the_model():
    layer = nn.BatchNorm1d(4)
    layer.table = torch.rand(3, requires_grad=True) * 2  # not a leaf: torch refuses to copy it
    layer.aside = [layer.bias, nn.Parameter(torch.ones(2), requires_grad=False)]
    layer.weight.grad = torch.ones(4)
    copy, again = (first_step._copy(layer, copies) for copies in [{}] * 2)
    assert copy is again
    held = [*copy.parameters(), *copy.buffers(), copy.table, *copy.aside]
    assert all(tensor.is_meta for tensor in held)
    assert copy.aside[0] is copy.bias
    assert [p.requires_grad for p in (copy.weight, copy.aside[1])] == [True, False]
    assert copy.weight.grad is None
    assert not any(tensor.is_meta for tensor in (layer.table, *layer.aside, *layer.buffers()))


def test_a_failed_compilation_is_forgotten_so_that_its_launch_compiles_again():
    failed = SimpleNamespace(result=lambda ignore_errors: None)
    kept = SimpleNamespace(result=lambda ignore_errors: "a kernel")
    kernels = {"first": failed, "second": kept}
    for begun in (failed, kept):
        _wait_for(begun, SimpleNamespace(device_caches={0: (kernels, {})}))
    assert kernels == {"second": kept}


def test_threads_that_compile_make_launchers_too_and_leave_their_errors_to_the_launch(monkeypatch):
    pytest.importorskip("triton")
    made = []

    def launcher(source, metadata):
        made.append((source, metadata))
        raise OSError("no C compiler")

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(_ahead.triton.runtime, "driver", driver)
    kernel = SimpleNamespace(src="source", metadata="metadata")
    with _ahead._Pool(1) as pool:
        assert pool.submit(lambda: kernel).result() is kernel
    assert made == [("source", "metadata")]


def test_parts_made_from_specs_are_as_the_models_own():
    model = liger_models.from_config(find_architecture("qwen3_next").tiny, dtype=torch.bfloat16)
    model.set_activation_memory("mlp")
    model.layers[0].requires_grad_(False)
    state = torch.get_rng_state()
    layers, norm, head = first_step._made_anew(model, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    for own, true in zip(
        [*layers, norm, head], [*first_step._kinds(model), model.norm, model.lm_head], strict=True
    ):
        kinds = [(n, p.shape, p.dtype, p.requires_grad) for n, p in true.named_parameters()]
        assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in own.named_parameters()] == kinds
        assert all(p.is_meta for p in own.parameters())
        assert getattr(own, "activation_memory", None) == getattr(true, "activation_memory", None)
    with pytest.raises(ValueError, match="another dtype"):
        first_step._made_anew(model, torch.float32)
