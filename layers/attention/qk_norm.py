"""Norms of queries and keys (Henry et al., 2020, arXiv:2010.04245), before their rotation or after it.

    q, k, v = split(qkv);   q, k = rotate(norm(q)), rotate(norm(k))   or   norm(rotate(q)), norm(rotate(k))

`QKNormSpec` in layers/specs/attention.py says which elements share a norm and a weight. RMSNorm and rotation
are one kernel (kernels/rotary/qk_norm_rotary.py); the cases that it does not support run step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Expr, Ref, Stack
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.kernels import layer_norm, rms_norm, rotary, split_norm_rotary_qkv
from liger_models.kernels._dispatch import at_least_float32
from liger_models.kernels.norms.rms_norm import rms_norm_plain
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.specs import AttentionSpec, NormSpec, QKNormSpec

Tables = tuple[Tensor, Tensor]
Split = tuple[Tensor, Tensor, Tensor]


class QKNormScale(nn.Module):
    """The weight and bias of a query or key norm, for a kernel that fuses the norm with other work.

    `scale(use)` returns `use(weight, bias)`: the parameters are read inside the module's own forward, since
    sharding frameworks gather them only for that time.

    Args:
        heads, head_dim: the heads of the queries, or of the keys.
        spec: the norm and its scope.
    """

    stacked_vectors = ("weight", "bias")  # of each head, where heads have their own

    def __init__(self, heads: int, head_dim: int, spec: QKNormSpec):
        super().__init__()
        if not spec.norm.weighted:
            raise ValueError("a QKNormSpec without weights has scope 'unweighted', not a norm without them")
        self.spec = spec
        shapes = {"head": (head_dim,), "own_head": (heads, head_dim), "all_heads": (heads * head_dim,)}
        shape = shapes.get(spec.scope)
        with_bias = not isinstance(spec.norm, NormSpec) and spec.norm.bias
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape))
        self.bias = None if shape is None or not with_bias else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """A factor of one and a bias of zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.spec.norm.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def canonical_form(self, path: str, name: str) -> Expr | None:
        """The weight of each head by itself, where heads have weights of their own."""
        if self.spec.scope != "own_head":
            return None
        heads, head_dim = shape_of(self.get_parameter(name))
        return Stack(tuple(Ref(f"{path}.norms.{head}.{name}", (head_dim,)) for head in range(heads)))

    def forward(self, use: Callable[[Tensor | None, Tensor | None], Split]) -> Split:
        return use(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.spec}" if self.weight is None else f"{tuple(self.weight.shape)}, {self.spec}"


def split_norm_rotate(
    qkv: Tensor, tables: Tables | None, spec: AttentionSpec, q_scale: QKNormScale, k_scale: QKNormScale
) -> Split:
    """Split queries, keys and values; normalise and rotate queries and keys.

    Args:
        qkv: [T, q_size + kv_size + v_size], queries, keys, values; without values if they equal the keys.
        tables: cosines and sines, [T, dim / 2] each, or [2, T, dim / 2] of both dimensions of pairs; None for
            no rotation.
        spec: heads and norms.
        q_scale, k_scale: the norms' weights.

    Returns:
        q [T, num_attention_heads, head_dim], k [T, num_key_value_heads, head_dim], v the same or with heads
        of another width.
    """
    assert spec.qk_norm is not None
    norms = spec.qk_norm
    split = _fused if tables is not None and tables[0].dim() == 2 and is_fused(spec) else _step_by_step

    def with_q_weight(*of_q: Tensor | None) -> Split:
        def with_k_weight(*of_k: Tensor | None) -> Split:
            return split(qkv, tables, spec, norms, of_q, of_k)

        return k_scale(with_k_weight)

    q, k, v = q_scale(with_q_weight)  # each weight is read within its own module's forward
    return q, k, rms_norm(v, None, norms.norm.eps) if norms.values else v


def is_fused(spec: AttentionSpec) -> bool:
    """Whether one kernel normalises and rotates."""
    norms = spec.qk_norm
    rms = norms is not None and isinstance(norms.norm, NormSpec) and norms.scope != "own_head"
    turned = spec.rope is not None and not spec.rope.halves
    return rms and turned and not spec.values_are_keys and spec.value_dim == spec.head_dim


def norm_bytes(spec: AttentionSpec, itemsize: int) -> int:
    """Bytes per token that the norms add to the memory attention keeps: their inputs, and 1/rms in float32
    (mean and 1/std for LayerNorm) of each head, or of queries and keys if all heads share a norm. Heads with
    weights of their own keep only the inputs. Step by step, the rotation after a norm keeps nothing.
    """
    norms = spec.qk_norm
    assert norms is not None
    rows = 2 if norms.scope == "all_heads" else spec.num_attention_heads + spec.num_key_value_heads
    statistics = 0 if norms.scope == "own_head" else 4 if isinstance(norms.norm, NormSpec) else 8
    kept = itemsize * (spec.q_size + spec.kv_size) + statistics * rows
    if norms.values:
        kept += 4 * spec.num_key_value_heads + (0 if spec.values_are_keys else itemsize * spec.v_size)
    return kept


def norm_work(spec: AttentionSpec) -> int:
    """Working memory per token of the backward pass of the queries' norm, if heads have weights of their own:
    five tensors in float32 (input, output and three gradients), about two of which reuse memory that
    attention's backward pass has freed.
    """
    own = spec.qk_norm is not None and spec.qk_norm.scope == "own_head"
    return own * 3 * 4 * spec.q_size


def _fused(qkv: Tensor, tables: Any, spec: Any, norms: Any, q: Any, k: Any) -> Split:
    heads = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    return split_norm_rotary_qkv(
        qkv,
        q[0],
        k[0],
        tables[0],
        tables[1],
        *heads,
        eps=norms.norm.eps,
        offset=norms.norm.offset,
        cast=norms.norm.cast,
        per_head=norms.scope != "all_heads",
        norm_first=norms.before_rope,
        interleaved=spec.rope.interleaved,
    )


def _step_by_step(qkv: Tensor, tables: Any, spec: Any, norms: Any, q: Any, k: Any) -> Split:
    queries, keys, *own = qkv.split(
        [spec.q_size, spec.kv_size] + [spec.v_size] * (not spec.values_are_keys), dim=-1
    )
    queries, keys = (part.unflatten(-1, (-1, spec.head_dim)) for part in (queries, keys))
    values = own[0].unflatten(-1, (-1, spec.value_dim)) if own else keys
    if norms.before_rope:
        queries, keys = _norm(queries, norms, *q), _norm(keys, norms, *k)
    if tables is not None:
        turn = rotary_by_halves if spec.rope.halves else rotary
        if tables[0].dim() == 3:
            if spec.rope.halves:
                raise ValueError("halves of a head that rotate separately have one axis for each pair")
            turn = rotary_of_dimensions
        queries, keys = turn(queries, keys, tables[0], tables[1], spec.rope.interleaved)
    if not norms.before_rope:
        queries, keys = _norm(queries, norms, *q), _norm(keys, norms, *k)
    # A weight wider than the activations promotes the norm's result; attention needs one dtype for all three.
    return queries.to(qkv.dtype), keys.to(qkv.dtype), values


def rotary_by_halves(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`rotary` of each half of a head separately."""
    halves = zip(*(x.chunk(2, dim=-1) for x in (q, k, cos, sin)), strict=True)
    turned = [rotary(q, k, cos.contiguous(), sin.contiguous(), interleaved) for q, k, cos, sin in halves]
    queries, keys = zip(*turned, strict=True)
    return torch.cat(queries, -1), torch.cat(keys, -1)


def rotary_of_dimensions(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`rotary` with an angle for each dimension, tables [2, T, D / 2]: the first half of a head of a rotation
    by the first angles, and the second half of one by the others. Both are in float32, so that their
    gradients are added before they are rounded.
    """
    if interleaved or q.shape[-1] != 2 * cos.shape[2]:
        raise ValueError("angles of single dimensions are for whole heads whose pairs are not interleaved")
    first, second = (rotary(at_least_float32(q), at_least_float32(k), cos[i], sin[i]) for i in range(2))
    queries, keys = (
        torch.cat([one.chunk(2, -1)[0], other.chunk(2, -1)[1]], -1).to(x.dtype)
        for one, other, x in zip(first, second, (q, k), strict=True)
    )
    return queries, keys


def _norm(x: Tensor, norms: QKNormSpec, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [T, heads, head_dim] normalised."""
    norm = norms.norm
    if norms.scope == "own_head":
        run = functools.partial(_norm_own_heads, norms=norms)
        # Recomputed, since autograd would keep several tensors in float32.
        return run(x, weight, bias) if torch.compiler.is_compiling() else recompute(run, x, weight, bias)
    rows = x.flatten(1) if norms.scope == "all_heads" else x
    if isinstance(norm, NormSpec):
        y = rms_norm(rows, weight, norm.eps, norm.offset, norm.cast)
    else:
        y = layer_norm(rows, weight, bias, norm.eps, norm.offset)
    return y.view(x.shape)


def _norm_own_heads(x: Tensor, weight: Any, bias: Tensor | None, norms: QKNormSpec) -> Tensor:
    """x [T, heads, head_dim] normalised, with a weight [heads, head_dim]."""
    norm = norms.norm
    if isinstance(norm, NormSpec):
        return rms_norm_plain(x, weight, norm.eps, norm.offset, norm.cast)
    # The kernel supports no weight that differs by row, so it runs without one, in float32, to round once.
    y = layer_norm(at_least_float32(x), None, None, norm.eps) * (at_least_float32(weight) + norm.offset)
    return (y if bias is None else y + at_least_float32(bias)).to(x.dtype)
