"""Layers write over the outputs of their own projections, but not where a user's hook has seen them."""

import pytest
import torch

from liger_models.kernels._dispatch import interpret
from liger_models.layers.activation_memory import output_is_ours
from liger_models.layers.mlp import LigerSwiGLUMLP


@pytest.fixture(autouse=True)
def interpreted():
    if torch.cuda.is_available():
        pytest.skip("on this machine the kernels are compiled")
    with interpret():
        yield


def test_a_tensor_that_a_forward_hook_kept_is_not_written_over():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    kept = []
    mlp.gate_up_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    mlp(torch.randn(3, 8)).sum().backward()
    assert kept[0]._version == 0


def test_without_hooks_the_output_is_written_over():
    torch.manual_seed(0)
    mlp = LigerSwiGLUMLP(8, 12)
    seen = []
    product = mlp.gated_product
    mlp.gated_product = lambda gate_up, **options: (seen.append(gate_up), product(gate_up, **options))[1]
    mlp(torch.randn(3, 8)).sum().backward()
    assert seen[0]._version == 1


def test_a_global_hook_counts_too():
    module = torch.nn.Linear(2, 2)
    assert output_is_ours(module)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not output_is_ours(module)
    finally:
        handle.remove()
