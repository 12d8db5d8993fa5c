"""Rotary embedding of packed and separate queries and keys, with a preceding norm, and with several axes.

All take positions 0 to seq - 1 of every sequence and 32 + 8 heads of 128.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.operations.core import (
    EPS,
    Cost,
    Provider,
    Tensors,
    liger,
    liger_function,
    near_one,
    normal,
    operation,
    standard_case,
)
from benchmarks.operations.norms import eager_rms_norm
from liger_models import kernels

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SECTIONS = (16, 24, 24)  # frequencies for time, height and width in Qwen2-VL
SHAPES = {"shapes": ((8, 4096),), "tiny": (2, 32), "small": (1, 512)}


def rotary_tables(positions: Tensor, dtype: torch.dtype) -> Tensors:
    """cos and sin [..., D/2] in float32, for ours, and [..., D] for transformers and liger-kernel. All hold
    the same numbers, rounded to `dtype`, so that all rotate by the same angles.
    """
    frequencies = 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM)
    angles = positions[..., None] * frequencies
    cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
    return cos, sin, torch.cat([cos, cos], -1).to(dtype), torch.cat([sin, sin], -1).to(dtype)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, S, D] rotated as in transformers; cos and sin [B or 1, S, D]."""

    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class _Packed:
    """Queries, keys and values packed, as one projection returns them, and their rotation by `turn`."""

    def __init__(self, shape, dtype, device):
        self.batch, self.seq = shape
        tokens, heads = self.batch * self.seq, HEADS + 2 * KV_HEADS
        self.qkv = normal((tokens, heads * HEAD_DIM), dtype, device)
        self.upstream = tuple(
            normal((tokens, n, HEAD_DIM), dtype, device) for n in (HEADS, KV_HEADS, KV_HEADS)
        )
        cos, sin, *self.wide_tables = rotary_tables(torch.arange(self.seq, device=device), dtype)
        self.tables = cos.repeat(self.batch, 1), sin.repeat(self.batch, 1)
        self.qk_bytes = tokens * (HEADS + KV_HEADS) * HEAD_DIM * self.qkv.itemsize
        self.v_bytes = tokens * KV_HEADS * HEAD_DIM * self.qkv.itemsize

    def split(self, turn, qkv, q_norm=lambda q: q, k_norm=lambda k: k) -> Tensors:
        q, k, v = qkv.view(self.batch, self.seq, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 2)
        cos, sin = (table[None].to(qkv.dtype) for table in self.wide_tables)
        q, k = turn(q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2), cos, sin)
        return q.transpose(1, 2).flatten(0, 1), k.transpose(1, 2).flatten(0, 1), v.flatten(0, 1)


@operation("rotary_qkv", "batch x seq", **SHAPES)
def _rotary_qkv(shape, dtype, device):
    packed = _Packed(shape, dtype, device)
    return standard_case(
        (packed.qkv,),
        packed.upstream,
        ours=lambda qkv: kernels.split_rotary_qkv(
            qkv, *packed.tables, HEADS, KV_HEADS, HEAD_DIM, inplace=True
        ),
        liger=liger("LigerRopeFunction", packed.split),
        eager=lambda qkv: packed.split(turn, qkv),
        # Forward: queries and keys in and out. Backward: the gradients of all three in and out.
        forward=Cost(2 * packed.qk_bytes),
        training=Cost(4 * packed.qk_bytes + 2 * packed.v_bytes),
    )


@operation("norm_rotary_qkv_all_heads", "batch x seq", **SHAPES, per_head=False)
@operation("norm_rotary_qkv", "batch x seq", **SHAPES, per_head=True)
def _norm_rotary_qkv(shape, dtype, device, per_head):
    """Queries and keys normalised, per head or over all heads together, then rotated."""
    packed = _Packed(shape, dtype, device)
    widths = [HEAD_DIM * (1 if per_head else heads) for heads in (HEADS, KV_HEADS)]

    def normed(turn, norm, qkv, q_weight, k_weight):
        def over_heads(x, weight):  # [B, S, heads, D]
            return norm(x, weight) if per_head else norm(x.flatten(2), weight).view(x.shape)

        return packed.split(turn, qkv, lambda q: over_heads(q, q_weight), lambda k: over_heads(k, k_weight))

    def peer():
        rotary, rms_norm = liger_function("LigerRopeFunction"), liger_function("LigerRMSNormFunction")

        def norm(x, weight):
            return rms_norm(x, weight, EPS)

        return Provider(partial(normed, rotary, norm), note="separate norms and rotary")

    def ours(qkv, q_weight, k_weight):
        return kernels.split_norm_rotary_qkv(
            qkv,
            q_weight,
            k_weight,
            *packed.tables,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            eps=EPS,
            per_head=per_head,
        )

    return standard_case(
        (packed.qkv, *(near_one(width, dtype, device) for width in widths)),
        packed.upstream,
        ours=ours,
        liger=peer,
        eager=partial(normed, turn, eager_rms_norm),
        # Forward: queries and keys in and out. Backward: they and the gradients of all three in, those out.
        forward=Cost(2 * packed.qk_bytes),
        training=Cost(5 * packed.qk_bytes + 2 * packed.v_bytes),
    )


@operation("rotary", "batch x seq", **SHAPES)
def _rotary(shape, dtype, device):
    """Separate queries and keys, as separate projections return them."""
    positions = torch.arange(shape[1], device=device)
    cos, sin, wide_cos, wide_sin = rotary_tables(positions, dtype)
    wide_tables = wide_cos[None], wide_sin[None]
    return _separate(
        shape,
        dtype,
        device,
        ours=lambda q, k: kernels.rotary(q, k, cos, sin),
        liger=lambda turn: liger(
            "LigerRopeFunction", lambda apply, q, k: turn(lambda q, k: apply(q, k, *wide_tables), q, k)
        ),
        eager=lambda q, k: turn(q, k, *(table.to(q.dtype) for table in wide_tables)),
    )


@operation("rotary_multi_axis", "batch x seq", **SHAPES)
def _rotary_multi_axis(shape, dtype, device):
    """Positions with three axes, as for image patches in Qwen2-VL."""
    positions = torch.randint(shape[1], (3, *shape), device=device)
    cos, sin, wide_cos, wide_sin = rotary_tables(positions, dtype)
    # A model shares its tables among layers, so ours are merged in advance; the others merge in every call.
    merged = kernels.multi_axis_tables(cos, sin, SECTIONS)

    def eager(q, k):
        def merge(table):
            parts = table.to(q.dtype).split(2 * SECTIONS, -1)
            return torch.cat([part[n % 3] for n, part in enumerate(parts)], -1)

        return turn(q, k, merge(wide_cos), merge(wide_sin))

    return _separate(
        shape,
        dtype,
        device,
        ours=lambda q, k: kernels.rotary(q, k, *merged),
        liger=lambda turn: liger(
            "LigerQwen2VLMRopeFunction",
            lambda apply, q, k: turn(lambda q, k: apply(q, k, wide_cos, wide_sin, list(SECTIONS)), q, k),
        ),
        eager=eager,
    )


def _separate(shape, dtype, device, ours, liger, eager):
    """Queries and keys [B, S, heads, D]. The others take and return [B, heads, S, D]."""
    q, dq = (normal((*shape, HEADS, HEAD_DIM), dtype, device) for _ in range(2))
    k, dk = (normal((*shape, KV_HEADS, HEAD_DIM), dtype, device) for _ in range(2))

    def heads_first(turn, q, k):
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2))
        return q.transpose(1, 2), k.transpose(1, 2)

    passing = 2 * (q.nbytes + k.nbytes)  # in and out, forward and backward alike
    return standard_case(
        (q, k),
        (dq, dk),
        ours=ours,
        liger=liger(heads_first),
        eager=lambda q, k: heads_first(eager, q, k),
        forward=Cost(passing),
        training=Cost(2 * passing),
    )
