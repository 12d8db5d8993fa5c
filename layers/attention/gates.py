"""Gates of attention's output, by channel or by head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels import sigmoid_gated
from liger_models.kernels._copies import copy_in_words
from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.layers.recompute.activation_memory import carry_recipe


def split_gate(projected: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """A projection whose heads of queries each have their gate next to them -> q | k | v and the gate,
    contiguous copies.

    Args:
        projected: [T, 2 * heads * width + the rest], the rest being keys and values.
        heads, width: of the queries.

    Returns:
        [T, heads * width + the rest] and [T, heads * width].
    """
    if torch.compiler.is_compiling() or type(projected) is not Tensor:
        pairs, rest = projected.tensor_split([2 * heads * width], dim=-1)
        q, gate = pairs.unflatten(-1, (heads, 2, width)).unbind(2)
        return torch.cat([q.flatten(1), rest], dim=-1), gate.flatten(1)
    qkv, gate = _SplitGate.apply(projected, heads, width)
    return qkv, gate


class _SplitGate(torch.autograd.Function):
    """`split_gate`, which moves every element once in either direction."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
        ctx.heads, ctx.width = heads, width
        tokens, channels = projected.shape
        qkv = projected.new_empty(tokens, channels - heads * width)
        gate = projected.new_empty(tokens, heads * width)
        for whole, part in _pairs_of_parts(projected, qkv, gate, heads, width):
            copy_in_words(whole, part)
        return qkv, gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: Tensor, dgate: Tensor) -> tuple[Tensor, None, None]:
        whole = dqkv.new_empty(len(dqkv), dqkv.shape[1] + dgate.shape[1])
        for to, part in _pairs_of_parts(whole, dqkv, dgate, ctx.heads, ctx.width):
            copy_in_words(part, to)
        return whole, None, None


def _pairs_of_parts(
    whole: Tensor, qkv: Tensor, gate: Tensor, heads: int, width: int
) -> list[tuple[Tensor, Tensor]]:
    """Views of the same elements in the projection and in the tensors it is split into."""
    pairs, rest = whole.tensor_split([2 * heads * width], dim=-1)
    by_head = pairs.unflatten(-1, (heads, 2, width))
    q, others = qkv.tensor_split([heads * width], dim=-1)
    return [
        (by_head[:, :, 0], q.unflatten(-1, (heads, width))),
        (by_head[:, :, 1], gate.unflatten(-1, (heads, width))),
        (rest, others),
    ]


def gated(out: Tensor, gate: Tensor | None, softplus: bool = False) -> Tensor:
    """The output of attention [T, o_size] times the sigmoid of a gate, [T, o_size] or [T, heads], or its
    softplus in float32.
    """
    if gate is None:
        return out
    alike = gate.shape == out.shape and gate.dtype == out.dtype
    if alike and not softplus and not torch.compiler.is_compiling():
        return carry_recipe(sigmoid_gated(gate, out), sigmoid_gated, gate, out, late=True)
    open_by = F.softplus(at_least_float32(gate)).to(gate.dtype) if softplus else gate.sigmoid()
    return carry_recipe(_by_head(out, open_by), _by_head, out, open_by, late=True)


def _by_head(out: Tensor, factors: Tensor) -> Tensor:
    """[T, o_size] times [T, o_size] or [T, heads]."""
    return (out.unflatten(-1, (factors.shape[-1], -1)) * factors.unsqueeze(-1)).flatten(1)
