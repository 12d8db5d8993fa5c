"""Attention over packed documents, with soft cap, sliding window and sinks; causal, or over ranges of keys.

    s_qk  = scale * q . k,                       with a cap: softcap * tanh(s_qk / softcap)
                                                 with slopes: + slope * (place of k - place of q)
    p_qk  = exp(s_qk) / (sum_k exp(s_qk) + exp(sink)),       over the keys visible to q
    out_q = sum_k p_qk v_k

A query attends to the tokens of its own document up to itself, or with a window the last `window` of those.
Explicit ranges of keys (visible_keys.py) replace this rule: the whole document, as in an image encoder; the
tokens of the same image in addition to the preceding ones; or a parent document in addition to its own. Or
an indexer chooses some of the keys (chosen_keys.py), or blocks of them for each group of heads
(chosen_blocks.py): tiles without a chosen key are skipped (_visits.py), and other keys masked.

    delta_q = dout_q . out_q,      ds_qk = p_qk (dout_q . v_k - delta_q),      with a cap times 1 - tanh^2
    dq = scale * sum_k ds_qk k,    dk = scale * sum_q ds_qk q,    dv = sum_q p_qk dout_q
    dsink = -sum_q exp(sink - lse_q) delta_q,      lse_q the logarithm of p's denominator

FlashAttention 2 (Dao, 2023, arXiv:2307.08691), with dq in a separate kernel instead of atomic additions, so
that gradients are deterministic. The cap is Gemma 2's (arXiv:2408.00118, section 2), the sinks are gpt-oss's
(arXiv:2508.10925, section 2), the slopes are ALiBi's (Press et al., 2021, arXiv:2108.12409).

Scores never leave the chip. Saved for the backward pass: q, k, v, out and lse. The work is proportional to
the tiles with any visible score, with 2 products in the forward pass and 7 in the backward pass.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    ceil_div,
    contiguous_like,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    rows_to_copy,
    use_triton,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.attention._checks import (
    check_bounds,
    check_chosen,
    check_operands,
    check_slopes,
)
from liger_models.kernels.attention._forward_kernel import attention_forward_kernel
from liger_models.kernels.attention._gradient_kernels import (
    attention_key_value_gradient_kernel,
    attention_query_gradient_kernel,
)
from liger_models.kernels.attention._tile_sizes import Configuration, Tiles, find_tiles
from liger_models.kernels.attention._visits import tiles_to_visit
from liger_models.kernels.attention.chosen_blocks import ChosenBlocks, blocks_mask
from liger_models.kernels.attention.chosen_keys import chosen_mask
from liger_models.kernels.attention.visible_keys import KeyRanges, document_bounds, visible_keys

Once = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]
"""Runs a function, or returns its results of an earlier run."""

_LOG2_E = 1.4426950408889634  # lse is in units of ln(2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bounds: Tensor | KeyRanges | None = None,
    chosen: Tensor | ChosenBlocks | None = None,
    once: Once | None = None,
) -> Tensor:
    """Attention over packed documents, causal unless `bounds` holds explicit ranges.

    Args:
        q: [T, heads, D], any strides; D <= 512.
        k: [T, kv_heads, D], v: [T, kv_heads, V], in q's dtype; V <= 512 and may differ from D. Query head h
            uses key head h // (heads / kv_heads).
        scale: of the scores; None: D ** -0.5.
        cu_seqlens: [documents + 1] integers on q's device, rising from 0 to T: the documents' boundaries.
            None: one document.
        window: maximum number of visible tokens, the query's own included; None: unlimited.
        softcap: bound of the scaled scores; None: no cap.
        sinks: [heads], one logit per head that takes a share of the weights and contributes no value.
        slopes: [heads] float32, without a gradient: each head subtracts its slope times the distance from a
            score (ALiBi). The distance is counted in rows of q and k.
        bounds: `document_bounds(cu_seqlens, T)` instead of `cu_seqlens`, for calls that share documents; or
            `key_ranges(...)` or `tree_ranges(...)`, which define visibility completely, so that `window` must
            be None.
        chosen: [T, words] int32 from `choose_keys`, the keys of its document that each query attends to, or
            `ChosenBlocks` from `choose_blocks`, for T queries and a divisor of `heads`; at least one key up
            to the query. None: all.
        once: called with the function that launches the forward kernel; returns that function's results, out
            [T, heads, V] and lse [heads, T] float32, or those of an earlier call with the same operands. Only
            the kernel asks it.

    Returns:
        [T, heads, V] in q's dtype. Products accumulate in float32; float32 products are exact (never TF32).
        q, k, v and sinks have gradients.

    Raises:
        ValueError: incompatible shapes, dtypes or devices; a window or cap that is not positive.
        TypeError: a tensor of integers among q, k, v, sinks; boundaries that are not integers.
    """
    check_operands(q, k, v, window, softcap, sinks)
    check_slopes(slopes, q)
    if cu_seqlens is not None:
        if bounds is not None:
            raise ValueError("got both cu_seqlens and bounds; pass only one of them")
        bounds = document_bounds(cu_seqlens, len(q))
    elif bounds is not None:
        check_bounds(bounds, len(q), window)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    if window is not None and window >= len(q):
        window = None
    ranges = isinstance(bounds, KeyRanges)
    if chosen is not None:
        check_chosen(chosen, q, v, ranges or window is not None)
    of_queries, of_keys, marked = bounds if isinstance(bounds, KeyRanges) else (bounds, bounds, None)
    bits, size = chosen if isinstance(chosen, ChosenBlocks) else (chosen, 0)
    runs = use_triton(q, k, v, sinks, slopes, of_queries, of_keys, marked, bits)
    if runs and not has_tiles(q, v):
        _say_no_tiles(gpu_of(q).arch)
        runs = False
    if not runs:
        out = attention_plain(q, k, v, scale, bounds, window, softcap, sinks, slopes, chosen=chosen)
        return as_once_differentiable(out)
    q, k, v = (_with_small_strides(x) for x in (q, k, v))
    operands = (sinks, slopes, of_queries, of_keys, marked, bits)
    others = (None if x is None else x.contiguous() for x in operands)
    return _Attention.apply(q, k, v, *others, once, ranges, scale, window, softcap, size)


def attention_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bounds: Tensor | KeyRanges | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    chosen: Tensor | ChosenBlocks | None = None,
) -> Tensor:
    """Plain twin of `attention`; materialises all scores. `dropout`, which the kernels do not have, is the
    probability of dropping a weight.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    places = torch.arange(len(q), device=q.device)
    bias = None if slopes is None else slopes[:, None, None] * (places - places[:, None])
    visible = visible_keys(len(q), bounds, window, q.device)
    if chosen is not None:
        assert not isinstance(bounds, KeyRanges)
        visible = visible & mask_of_heads(chosen, bounds, *q.shape[:2])
    weights = attention_weights(scores, visible, softcap, sinks, bias)
    weights = torch.dropout(weights, dropout, train=True) if dropout else weights
    return torch.einsum("hqk,khd->qhd", weights, v)


def mask_of_heads(chosen: Tensor | ChosenBlocks, bounds: Tensor | None, tokens: int, heads: int) -> Tensor:
    """Mask of the chosen keys: [T, T], or of chosen blocks [heads, T, T]."""
    if not isinstance(chosen, ChosenBlocks):
        return chosen_mask(chosen, bounds, tokens)
    return blocks_mask(chosen, bounds, tokens).repeat_interleave(heads // chosen.bits.shape[1], dim=0)


def attention_weights(
    scores: Tensor,
    visible: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax weights from scaled scores [..., heads, queries, keys]: applies the cap, adds the bias, then
    the softmax over the sinks and the keys where `visible` is true.
    """
    wide = at_least_float32(scores)
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    wide = wide if bias is None else wide + bias
    wide = wide.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return wide.softmax(-1).to(scores.dtype)
    sink = sinks.to(wide.dtype)[:, None, None].expand(*wide.shape[:-1], 1)
    return torch.cat([wide, sink], -1).softmax(-1)[..., :-1].to(scores.dtype)


def _with_small_strides(x: Tensor) -> Tensor:
    """x if its inner stride is one and the offsets in a tile fit 32 bits, else a copy."""
    return x if x.stride(2) == 1 and x.stride(0) < 2**23 else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, slopes, of_queries, of_keys, marked, chosen, once, *options):
        ranges, scale, window, softcap, size = ctx.options = options
        tokens, heads, _ = q.shape

        def run():
            out = q.new_empty(tokens, heads, v.shape[2])
            lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
            tiles = _configuration(q, v, size).forward
            strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
            if tokens:
                with on_device_of(q):
                    attention_forward_kernel[(heads * ceil_div(tokens, tiles.queries),)](
                        q,
                        k,
                        v,
                        of_queries,
                        marked,
                        chosen,
                        _visits(chosen, size, of_queries, tiles),
                        sinks,
                        slopes,
                        out,
                        lse,
                        *strides,
                        tokens,
                        heads,
                        window,
                        scale,
                        softcap,
                        _parts(of_queries),
                        *_words_and_groups(chosen),
                        *rows_to_copy(tiles.keys, k, v, padded=True),
                        **_constants(q, k, v, ranges, tiles, size),
                    )
            return out, lse

        out, lse = run() if once is None else once(run)
        ctx.save_for_backward(q, k, v, sinks, slopes, of_queries, of_keys, marked, chosen, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, slopes, of_queries, of_keys, marked, chosen, out, lse = ctx.saved_tensors
        ranges, scale, window, softcap, size = ctx.options
        tokens, heads, _ = q.shape
        kv_heads = k.shape[1]
        dout = _with_small_strides(dout)
        delta = torch.empty_like(lse)
        dq, dk, dv = (contiguous_like(x) for x in (q, k, v))
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2]
        if tokens:
            with on_device_of(q):
                tiles = _configuration(q, v, size).query_gradient
                attention_query_gradient_kernel[(heads * ceil_div(tokens, tiles.queries),)](
                    q,
                    k,
                    v,
                    of_queries,
                    marked,
                    slopes,
                    chosen,
                    _visits(chosen, size, of_queries, tiles),
                    out,
                    dout,
                    lse,
                    delta,
                    dq,
                    *strides,
                    tokens,
                    heads,
                    window,
                    scale,
                    softcap,
                    _parts(of_queries),
                    *_words_and_groups(chosen),
                    *rows_to_copy(tiles.keys, k, v, padded=True),
                    **_constants(q, k, v, ranges, tiles, size),
                )
                tiles = _configuration(q, v, size).key_value_gradient
                attention_key_value_gradient_kernel[(kv_heads * ceil_div(tokens, tiles.keys),)](
                    q,
                    k,
                    v,
                    of_keys,
                    marked,
                    slopes,
                    chosen,
                    _visits(chosen, size, of_keys, tiles, of_keys=True),
                    dout,
                    lse,
                    delta,
                    dk,
                    dv,
                    *strides,
                    tokens,
                    kv_heads,
                    window,
                    scale,
                    softcap,
                    _parts(of_keys),
                    *_words_and_groups(chosen),
                    *rows_to_copy(tiles.queries, q, dout, padded=True),
                    **_constants(q, k, v, ranges, tiles, size),
                )
        dsinks = None
        if ctx.needs_input_grad[3]:
            shares = torch.exp2(sinks.float()[:, None] * _LOG2_E - lse)
            dsinks = -(shares * delta).sum(1).to(sinks.dtype)
        return dq, dk, dv, dsinks, *[None] * 11


def has_tiles(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel has tiles for heads of these sizes on q's GPU."""
    return find_tiles(q, v) is not None


def _configuration(q: Tensor, v: Tensor, size: int) -> Configuration:
    """Tiles; `size` is that of chosen blocks, or 0."""
    tiles = find_tiles(q, v, blocks=size > 0)
    assert tiles is not None  # `attention` asks `has_tiles`
    return tiles


@functools.cache
def _say_no_tiles(arch: str) -> None:
    """Warn once of plain attention."""
    warnings.warn(
        f"the attention kernel has no tiles for heads this large on {arch}: plain attention runs, and keeps "
        "all scores; attention='auto' uses torch's kernels where they can do the same",
        stacklevel=3,
    )


def _parts(bounds: Tensor | None) -> int:
    return 1 if bounds is None else len(bounds) // 2


def _visits(
    chosen: Tensor | None, size: int, bounds: Tensor | None, tiles: Tiles, of_keys: bool = False
) -> Tensor | None:
    return None if chosen is None else tiles_to_visit(chosen, size, bounds, tiles, of_keys)


def _words_and_groups(chosen: Tensor | None) -> tuple[int, int]:
    if chosen is None:
        return 0, 1
    return chosen.shape[-1], 1 if chosen.dim() == 2 else chosen.shape[1]


def _constants(q: Tensor, k: Tensor, v: Tensor, ranges: bool, tiles: Tiles, size: int) -> dict[str, int]:
    head_dim, value_dim = q.shape[2], v.shape[2]
    block, rest = max(16, next_power_of_2(head_dim)), 0  # tensor cores need at least 16
    if block >= 256 and head_dim <= block * 3 // 4:
        block //= 2
        rest = max(16, next_power_of_2(head_dim - block))
    return {
        "RANGES": ranges,
        "GROUP": q.shape[1] // k.shape[1],
        "CHOSEN_SIZE": size,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": block,
        "BLOCK_REST": rest,
        "BLOCK_VALUE": max(16, next_power_of_2(value_dim)),
        "BLOCK_Q": tiles.queries,
        "BLOCK_K": tiles.keys,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
