"""Short causal depthwise convolution over packed documents (Mamba; Gu and Dao, 2023, arXiv:2312.00752).

    z[t, c] = bias[c] + sum over k < K of weight[c, k] * x[t - (K - 1) + k, c]
    y[t, c] = z[t, c], or silu(z[t, c])

Tokens before the start of t's document count as zero, or come from a given state: the last K - 1 inputs of
what the document continues. Everything is computed in float32 and rounded once.

Gradients, with dz = dy * silu'(z):

    dx[t, c]      = sum over j < K of weight[c, K - 1 - j] * dz[t + j, c], within the document
    dweight[c, k] = sum over t of dz[t, c] * x[t - (K - 1) + k, c]
    dbias[c]      = sum over t of dz[t, c]

Bytes moved at the least, for T tokens and C channels of b bytes: forward 2 T C b, backward 3 T C b. Only x is
kept for the backward pass, which computes z again.

`gated_short_conv` multiplies with two gates in the same kernels: y = C * z, of x = B * u (LFM2; Liquid AI,
2025, arXiv:2511.23404). It moves 4 T C b bytes forward and 7 T C b backward; apart, the two products, the
convolution and their gradients move 8 and 20.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    ceil_div,
    on_device_of,
    once_differentiable,
    use_triton,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels._split_columns import place_of, room_for
from liger_models.kernels.attention.visible_keys import document_bounds
from liger_models.kernels.norms._norm_sums import column_sum
from liger_models.kernels.recurrent._chunk_table import limit_registers
from liger_models.kernels.recurrent._short_conv_kernels import backward_kernel, forward_kernel

WIDEST = 8  # maximum number of taps; the kernels unroll them


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    bounds: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """Causal depthwise convolution of every document, with an optional SiLU.

    Args:
        x: [T, C], float dtype; rows may lie apart (a slice of a wider projection).
        weight: [C, K], 2 <= K <= 8; `weight[:, -1]` multiplies the token itself.
        bias: [C], or None.
        activation: "silu", or None.
        cu_seqlens: [documents + 1] integers that rise from 0 to T; None for one document.
        bounds: `document_bounds(cu_seqlens, T)` in place of `cu_seqlens`, to share it between calls.
        state: [documents, K - 1, C], the inputs before each document's first token, oldest first, as
            `conv_state` returns them; None for zeros. Needs `cu_seqlens` if there are several documents.

    Returns:
        [T, C] in x's dtype, contiguous. Running it again gives the same bits.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, both `cu_seqlens` and `bounds`, or tensors
            on several devices.
        TypeError: `cu_seqlens` does not hold integers, or x is not floating point.
    """
    _check(x, weight, bias, activation)
    if cu_seqlens is not None:
        if bounds is not None:
            raise ValueError("got both cu_seqlens and bounds, which say the same; give one of them")
        bounds = document_bounds(cu_seqlens, len(x))
    elif bounds is not None and bounds.shape != (2, len(x)):
        raise ValueError(f"bounds is {tuple(bounds.shape)}; expected {(2, len(x))}, as document_bounds gives")
    starts = None if bounds is None else bounds[0]
    if use_triton(x, weight, bias):
        y = _ShortConv.apply(x, weight, bias, starts, activation == "silu", False)
    else:
        y = as_once_differentiable(short_conv_plain(x, weight, bias, activation, starts))
    if state is None or not len(x):
        return y
    if cu_seqlens is None:
        if bounds is not None:
            raise ValueError("a state needs cu_seqlens, which say whose state is whose; got bounds")
        cu_seqlens = torch.tensor([0, len(x)], device=x.device)
    return _continue(y, x, weight, bias, activation, cu_seqlens, state)


def gated_short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, bounds: Tensor | None = None
) -> Tensor:
    """C * short_conv(B * u) of every document (LFM2; Liquid AI, 2025, arXiv:2511.23404).

    Args:
        x: [T, 3 C], float dtype: the gate B of the inputs, the gate C of the outputs, and u.
        weight, bias: as in `short_conv`.
        bounds: `document_bounds(cu_seqlens, T)`; None for one document.

    Returns:
        [T, C] in x's dtype, contiguous. Running it again gives the same bits.

    Raises:
        ValueError: shapes that do not fit, or tensors on several devices.
        TypeError: x is not floating point.
    """
    if x.dim() != 2 or x.shape[1] != 3 * weight.shape[0]:
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; expected [T, 3 C] and [C, K]")
    _check(x[:, : len(weight)], weight, bias, None)
    if bounds is not None and bounds.shape != (2, len(x)):
        raise ValueError(f"bounds is {tuple(bounds.shape)}; expected {(2, len(x))}, as document_bounds gives")
    starts = None if bounds is None else bounds[0]
    if use_triton(x, weight, bias):
        return _ShortConv.apply(x, weight, bias, starts, False, True)
    return as_once_differentiable(gated_short_conv_plain(x, weight, bias, starts))


def gated_short_conv_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Plain twin of `gated_short_conv`; `starts` as in `short_conv_plain`."""
    before, after, u = at_least_float32(x).chunk(3, dim=1)
    return (after * short_conv_plain(before * u, weight, bias, None, starts)).to(x.dtype)


def short_conv_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor | None = None
) -> Tensor:
    """Plain twin of `short_conv` without a state.

    starts: [T], the first token of each token's document; None for one document.
    """
    tokens, taps = len(x), weight.shape[1]
    wide, wide_weight = at_least_float32(x), at_least_float32(weight)
    token = torch.arange(tokens, device=x.device)
    position = token if starts is None else token - starts
    z = wide * wide_weight[:, -1]
    for back in range(1, taps):
        before = F.pad(wide, (0, 0, back, 0))[:tokens] * (position >= back)[:, None]
        z = z + before * wide_weight[:, taps - 1 - back]
    if bias is not None:
        z = z + at_least_float32(bias)
    return (F.silu(z) if activation == "silu" else z).to(x.dtype)


def conv_state(x: Tensor, cu_seqlens: Tensor | None, taps: int, state: Tensor | None = None) -> Tensor:
    """Return the last `taps` - 1 inputs of every document, from which `short_conv` continues.

    Args:
        x: [T, C], the inputs of the convolution.
        cu_seqlens: [documents + 1], or None for one document.
        taps: the convolution's width K.
        state: [documents, K - 1, C], the inputs before each document; None for zeros.

    Returns:
        [documents, K - 1, C] in x's dtype, oldest first. A document shorter than K - 1 keeps the end of
        its old state. Gradients flow to x and `state`.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, len(x)], device=x.device)
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    kept = taps - 1
    row = end + torch.arange(-kept, 0, device=x.device)  # [documents, K - 1]
    own = (row >= first)[..., None]
    last = x[row.clamp(0, max(len(x) - 1, 0))] if len(x) else x.new_zeros(len(first), kept, x.shape[1])
    if state is None:
        return last * own
    # Row r < first of the last inputs is the old state's row r - first + K - 1.
    old = (row - first + kept).clamp(0, kept - 1)[..., None].expand_as(last)
    return torch.where(own, last, state.to(x.dtype).gather(1, old))


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Process one further token of every sequence, for decoding.

    Args:
        x: [batch, C].
        weight, bias, activation: as in `short_conv`.
        state: [batch, K - 1, C] in x's dtype, oldest first.

    Returns:
        y [batch, C], and the state after the token [batch, K - 1, C], a new tensor.
    """
    _check(x, weight, bias, activation)
    window = torch.cat([state, x[:, None]], 1)
    z = (at_least_float32(window) * at_least_float32(weight).T).sum(1)
    if bias is not None:
        z = z + at_least_float32(bias)
    return (F.silu(z) if activation == "silu" else z).to(x.dtype), window[:, 1:]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"expected a floating point tensor, found {x.dtype}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}; expected 'silu' or None")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}; expected [T, C] and [C, K]")
    if not 2 <= weight.shape[1] <= WIDEST:
        raise ValueError(f"weight is {tuple(weight.shape)}; expected [C, K] with 2 <= K <= {WIDEST}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")


def _continue(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    state: Tensor,
) -> Tensor:
    """Return y with the first K - 1 tokens of every document computed from the documents' states.

    The kernels need no state: only these tokens read it.
    """
    documents, kept, channels = len(cu_seqlens) - 1, weight.shape[1] - 1, x.shape[1]
    if state.shape != (documents, kept, channels):
        raise ValueError(f"state is {tuple(state.shape)}; expected {(documents, kept, channels)}")
    first, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    row = first + torch.arange(kept, device=x.device)
    own = row < end
    opening = x[row.clamp(max=len(x) - 1)] * own[..., None]
    windows = torch.cat([state.to(x.dtype), opening], 1)  # [documents, 2 K - 2, C]
    before_each = torch.arange(0, documents * 2 * kept, 2 * kept, device=x.device).repeat_interleave(2 * kept)
    fresh = short_conv_plain(windows.flatten(0, 1), weight, bias, activation, before_each)
    fresh = fresh.view(documents, 2 * kept, channels)[:, kept:].flatten(0, 1)
    # Rows past a short document's end go to an extra row, which is dropped.
    target = torch.where(own, row, len(x)).flatten()
    return F.pad(y, (0, 0, 0, 1)).index_copy(0, target, fresh)[: len(x)]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, starts, silu, gated):
        ctx.place = place_of(x)
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        starts = None if starts is None else starts.contiguous()
        ctx.save_for_backward(x, weight, bias, starts)
        ctx.silu, ctx.gated = silu, gated
        tokens, channels = len(x), len(weight)
        y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
        if y.numel():
            rows, group, columns, warps = _tiles(gated, weight.shape[1])
            grid = (ceil_div(tokens, rows), ceil_div(channels, columns))
            with on_device_of(x):
                forward_kernel[grid](
                    x,
                    weight,
                    bias,
                    starts,
                    y,
                    x.stride(0),
                    tokens,
                    channels,
                    TAPS=weight.shape[1],
                    SILU=silu,
                    GATED=gated,
                    ROWS=rows,
                    GROUP=group,
                    COLUMNS=columns,
                    num_warps=warps,
                )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, starts = ctx.saved_tensors
        tokens, (channels, taps) = len(x), weight.shape
        dx = room_for(x, ctx.place)
        if not dx.numel():
            dbias = None if bias is None else torch.zeros_like(bias)
            return dx, torch.zeros_like(weight), dbias, None, None, None
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        rows, group, columns, warps, stages = _tiles_back(ctx.gated, taps)
        if gpu_of(x).amd:
            stages = 1  # rows that are read ahead would wait in registers
        segments = ceil_div(tokens, rows)
        sums = torch.empty(segments, taps + 1, channels, dtype=torch.float32, device=x.device)
        total = torch.empty((taps + 1) * channels, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            backward_kernel[(segments, ceil_div(channels, columns))](
                dy,
                x,
                weight,
                bias,
                starts,
                dx,
                sums,
                dy.stride(0),
                x.stride(0),
                dx.stride(0),
                tokens,
                channels,
                TAPS=taps,
                SILU=ctx.silu,
                GATED=ctx.gated,
                ROWS=rows,
                GROUP=group,
                COLUMNS=columns,
                STAGES=stages,
                num_warps=warps,
                **(limit_registers(x, 128) if taps <= 4 else {}),
            )
            column_sum(sums.view(segments, -1), total)
        total = total.view(taps + 1, channels)
        return (
            dx,
            total[:taps].T.to(weight.dtype),
            None if bias is None else total[taps].to(bias.dtype),
            None,
            None,
            None,
        )


# A program goes down some rows (tokens) of some channels with the last inputs in registers, so that memory is
# read once; it loads a group of rows at a time, to keep enough loads in flight. Rows, rows of a group,
# channels and warps.
def _tiles(gated: bool, taps: int) -> tuple[int, int, int, int]:
    if not gated:
        return 128, 4, 512, 4
    return 128 if taps <= 4 else 64, 4, 256, 4


def _tiles_back(gated: bool, taps: int) -> tuple[int, int, int, int, int]:
    """The same for gradients, and the groups in flight."""
    if not gated:
        return 256, 4, 256, 2, 2
    return 128 if taps <= 4 else 256, 4, 512, 4, 1
