"""Checks of attention's operands."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_models.kernels.attention.chosen_blocks import ChosenBlocks
from liger_models.kernels.attention.visible_keys import KeyRanges

MOST_HEAD_DIM = 512
MOST_HEAD_DIM_OF_CHOSEN = 256


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    fits = q.dim() == k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2]
    if not fits or (len(k), k.shape[2]) != (len(q), q.shape[2]):
        expected = "q [T, heads, D], k [T, kv_heads, D] and v [T, kv_heads, V]"
        raise ValueError(f"found {_shapes(q, k, v)}; expected {expected}")
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"found {_shapes(q, k, v)}: query heads must be a multiple of key heads")
    for size in (q.shape[2], v.shape[2]):
        if not 0 < size <= MOST_HEAD_DIM:
            raise ValueError(f"the head size is {size}; expected 1 to {MOST_HEAD_DIM}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"found q, k, v in {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected 1 or more (a query attends to itself), or None")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; expected a positive number, or None for no cap")
    if sinks is None:
        return
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks has the shape {tuple(sinks.shape)}; expected [{q.shape[1]}]")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks holds {sinks.dtype}; expected a floating point tensor")


def check_slopes(slopes: Tensor | None, q: Tensor) -> None:
    if slopes is None:
        return
    if slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32 or slopes.requires_grad:
        found = f"{slopes.dtype} of the shape {tuple(slopes.shape)}"
        found += ", with a gradient" if slopes.requires_grad else ""
        raise ValueError(f"slopes is {found}; expected [{q.shape[1]}] float32 without a gradient")


def check_bounds(bounds: Tensor | KeyRanges, tokens: int, window: int | None) -> None:
    ranges = isinstance(bounds, KeyRanges)
    for rows in bounds[:2] if isinstance(bounds, KeyRanges) else (bounds,):
        fits = rows.dim() == 2 and rows.shape[1] == tokens and rows.dtype == torch.int32
        if not fits or (len(rows) % 2 if ranges else len(rows) != 2):
            raise ValueError(
                f"bounds is {rows.dtype} of the shape {tuple(rows.shape)}; expected [2, {tokens}] int32 from "
                f"document_bounds, or KeyRanges of [2 * ranges, {tokens}] from key_ranges"
            )
    marked = bounds.marked if isinstance(bounds, KeyRanges) else None
    if marked is not None and (tuple(marked.shape) != (tokens,) or marked.dtype != torch.int32):
        raise ValueError(
            f"marked is {marked.dtype} of the shape {tuple(marked.shape)}; expected [{tokens}] int32"
        )
    if ranges and window is not None:
        raise ValueError(f"window is {window}, but bounds are ranges of keys: pass the window to key_ranges")


def check_chosen(chosen: Tensor | ChosenBlocks, q: Tensor, v: Tensor, otherwise_limited: bool) -> None:
    (tokens, heads), size = q.shape[:2], max(q.shape[2], v.shape[2])
    if otherwise_limited:
        raise ValueError("chosen keys go with causal documents, without window or ranges of keys")
    if size > MOST_HEAD_DIM_OF_CHOSEN:  # tiles of larger heads are narrower than a word
        raise ValueError(f"the head size is {size}; chosen keys need at most {MOST_HEAD_DIM_OF_CHOSEN}")
    bits, shape, source = chosen, f"[{tokens}, words]", "choose_keys"
    if isinstance(chosen, ChosenBlocks):
        bits, shape, source = chosen.bits, f"[{tokens}, a divisor of {heads}, words]", "choose_blocks"
    assert isinstance(bits, Tensor)
    fits = bits.dim() == (2 if bits is chosen else 3) and len(bits) == tokens and bits.dtype == torch.int32
    if not fits or (bits is not chosen and heads % bits.shape[1]):
        raise ValueError(
            f"chosen is {bits.dtype} of the shape {tuple(bits.shape)}; expected {shape} int32 from {source}"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
