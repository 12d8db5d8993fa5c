"""Small native models with every parameter random."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from randomised import randomise
from torch import nn

from liger_models.kernels._dispatch import interpret
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
)

sys.path.append(str(Path(__file__).parent))  # for helper modules in this folder

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 61, 32, 4, 2, 16, 40


@pytest.fixture(scope="session")
def make_model() -> Callable[..., CausalLM]:
    """A factory: `make_model(layers=2, window=None, kv_heads=2, **options of CausalLM)`."""

    def make(
        layers: int = 3,
        *,
        window: int | None = None,
        kv_heads: int = KV_HEADS,
        bias: bool = True,
        tied: bool = False,
        max_positions: int = 64,
        **options: Any,
    ) -> CausalLM:
        rope = RopeSpec(HEAD_DIM, max_position_embeddings=max_positions)
        attention = AttentionSpec(HEADS, kv_heads, HEAD_DIM, HEAD_DIM**-0.5, rope, window, bias, bias)
        block = BlockSpec(attention, MLPSpec(INNER, "silu", bias), NormSpec())
        spec = ModelSpec(VOCAB, HIDDEN, (block,) * layers, NormSpec(), tie_word_embeddings=tied)
        return randomise(CausalLM(spec, **options), torch.Generator().manual_seed(7))

    return make


@pytest.fixture
def randomised() -> Callable[[nn.Module], nn.Module]:
    """A function that makes every parameter and buffer of a module random."""
    torch.manual_seed(0)

    def randomise(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
        return module

    return randomise


@pytest.fixture
def moe_spec() -> MoESpec:
    """A mixture of experts with every option except groups."""
    return MoESpec(
        num_experts=8,
        experts_per_token=3,
        intermediate_size=12,
        score="sigmoid",
        correction_bias=True,
        routed_scaling_factor=1.5,
        float32_router=True,
        shared_expert=MLPSpec(20),
        shared_gate=True,
        aux_loss_coef=0.3,
        z_loss_coef=0.1,
    )


@pytest.fixture(params=["plain", "triton"])
def form(request) -> Iterator[str]:
    """Run a test twice: through the plain twins, and through the kernels in Triton's interpreter."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    with interpret() if request.param == "triton" else contextlib.nullcontext():
        yield request.param
