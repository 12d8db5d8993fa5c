"""Query/key norm and rotary in one pass over packed queries, keys and values.

For queries and keys each, with x a head's elements (Qwen 3, arXiv:2505.09388, section 2) or all heads' (OLMo
2, arXiv:2501.00656, section 3.2), and R the rotation of `rotary.py`, head by head:

    norm first:     y = R(n * s),   n = x * rstd,       s = offset + weight,  rstd = 1 / sqrt(mean(x^2) + eps)
    norm last:      y = n * s,      n = R(x) * rstd,    rstd of R(x)

    gradients:      g = R^T dy (norm last: dy)
                    dweight = sum over tokens (and heads, if they share the weight) of g * n
                    dn = g * s,     dx = (dn - n * mean(dn * n)) * rstd     (norm last: then R^T)

Minimum traffic, for a token's q, k and v of b bytes each: forward 2 (q + k), backward 3 (q + k) + 2 v. Saved
for the backward pass are only qkv, the projection's output, and rstd.

A tile is a few heads, which stay in registers, or all heads of one or a few tokens if they are normalised
together. A program of the forward kernel processes one tile. In the backward pass a fixed number of programs
stride over the tiles, each with its own sums for the weights; a second kernel adds those up in a fixed order,
so that gradients are deterministic. The kernels are in `_qk_norm_rotary_kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_heads,
    as_once_differentiable,
    as_rows,
    ceil_div,
    early_start,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
    use_triton,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels.norms._norm_sums import column_sum
from liger_models.kernels.norms.rms_norm import rms_norm_plain
from liger_models.kernels.rotary._qk_norm_rotary_kernels import backward_kernel, forward_kernel
from liger_models.kernels.rotary.rotary import check_tables, rotary_plain


def split_norm_rotary_qkv(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    eps: float,
    offset: float = 0.0,
    cast: str = "llama",
    per_head: bool = True,
    norm_first: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed queries, keys and values; normalise and rotate the queries and keys.

    Args:
        qkv: [T, (num_heads + 2 num_kv_heads) head_dim], queries first, then keys, then values.
        q_weight, k_weight: the norms' weights, of one dtype: [head_dim] each if `per_head`, else [num_heads
            head_dim] and [num_kv_heads head_dim]. Both None: no weights (Llama 4).
        cos, sin: [T, R/2] with R <= head_dim, as in `split_rotary_qkv`.
        eps, offset, cast: as in `rms_norm`.
        per_head: normalise each head separately (Qwen 3, Gemma 3), or all heads together (OLMo 2).
        norm_first: normalise before the rotation, or after it (Hunyuan, Llama 4).
        interleaved: pairing of elements, as in `rotary`.

    Returns:
        q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], in qkv's dtype. v is a view of qkv.

    Raises:
        ValueError: incompatible shapes, tables that require gradients, an unknown `cast`, one weight
            without the other, an offset without weights, or tensors on different devices.
    """
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        packed = f"({num_heads} + 2 * {num_kv_heads}) heads of {head_dim}"
        raise ValueError(f"qkv is {tuple(qkv.shape)}; expected [T, {width}] for {packed}")
    check_tables(cos, sin, qkv.shape[:1], head_dim)
    widths = [head_dim * (1 if per_head else count) for count in (num_heads, num_kv_heads)]
    _check_weights(q_weight, k_weight, widths, offset, cast)
    heads = num_heads, num_kv_heads, head_dim
    if use_triton(qkv, q_weight, k_weight, cos, sin):
        flags = per_head, norm_first, interleaved
        return _SplitNormRotaryQKV.apply(
            qkv, q_weight, k_weight, cos, sin, heads, eps, offset, cast == "llama", flags
        )
    plain = split_norm_rotary_qkv_plain(
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        *heads,
        eps=eps,
        offset=offset,
        cast=cast,
        per_head=per_head,
        norm_first=norm_first,
        interleaved=interleaved,
    )
    return as_once_differentiable(*plain)


def split_norm_rotary_qkv_plain(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    eps: float,
    offset: float = 0.0,
    cast: str = "llama",
    per_head: bool = True,
    norm_first: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain twin of `split_norm_rotary_qkv`."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], -2)

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if per_head:
            return rms_norm_plain(x, weight, eps, offset, cast)
        return rms_norm_plain(x.flatten(-2), weight, eps, offset, cast).view(x.shape)

    if norm_first:
        q, k = rotary_plain(norm(q, q_weight), norm(k, k_weight), cos, sin, interleaved)
    else:
        q, k = rotary_plain(q, k, cos, sin, interleaved)
        q, k = norm(q, q_weight), norm(k, k_weight)
    # A weight wider than the activations promotes the norm's result; attention needs one dtype for q, k and
    # v.
    return q.to(qkv.dtype), k.to(qkv.dtype), v


def _check_weights(
    q_weight: Tensor | None, k_weight: Tensor | None, widths: list[int], offset: float, cast: str
) -> None:
    if cast not in ("llama", "gemma", "float32"):
        raise ValueError(f"cast is {cast!r}; expected 'llama', 'gemma' or 'float32'")
    if q_weight is None or k_weight is None:
        if q_weight is not k_weight:
            raise ValueError("one of q_weight and k_weight is None; expected both or neither")
        if offset:
            raise ValueError(f"offset is {offset} but there are no weights to add it to")
        return
    found = [tuple(q_weight.shape), tuple(k_weight.shape)]
    if found != [(width,) for width in widths] or q_weight.dtype != k_weight.dtype:
        given = f"q_weight is {found[0]} in {q_weight.dtype}, k_weight {found[1]} in {k_weight.dtype}"
        raise ValueError(f"{given}; expected ({widths[0]},) and ({widths[1]},) in one dtype")


class _SplitNormRotaryQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, heads, eps, offset, round_first, flags):
        num_heads, num_kv_heads, head_dim = heads
        per_head, norm_first, interleaved = flags
        tokens = qkv.shape[0]
        weights = [None if weight is None else weight.contiguous() for weight in (q_weight, k_weight)]
        cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (cos, sin))
        # As in `rms_norm`, "llama" gives the promoted dtype: then nothing is rounded before the rotation.
        promotes = weights[0] is not None and torch.promote_types(qkv.dtype, weights[0].dtype) != qkv.dtype
        options = {
            "Q_HEADS": num_heads,
            "K_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": cos.shape[1],
            "PER_HEAD": per_head,
            "NORM_FIRST": norm_first,
            "ROUND_FIRST": round_first,
            "INTERLEAVED": interleaved,
            "BLOCK_HALF": next_power_of_2(cos.shape[1]),
            "BLOCK_REST": next_power_of_2(max(1, head_dim - 2 * cos.shape[1])),
            "Q_GROUP": 1 if per_head else next_power_of_2(num_heads),
            "K_GROUP": 1 if per_head else next_power_of_2(num_kv_heads),
        }
        turned = qkv.new_empty(tokens, num_heads + num_kv_heads, head_dim)
        rstd_shape = (tokens, num_heads + num_kv_heads if per_head else 2)
        rstd = torch.empty(rstd_shape, dtype=torch.float32, device=qkv.device)
        if tokens:
            rows = as_rows(qkv)
            q_rows, k_rows, num_warps = _forward_config(heads, per_head, _widest_row(options))
            q_tiles = _tiles(tokens, num_heads, q_rows, per_head)
            k_tiles = _tiles(tokens, num_kv_heads, k_rows, per_head)
            with on_device_of(qkv):
                forward_kernel[(q_tiles + k_tiles,)](
                    rows,
                    *weights,
                    cos,
                    sin,
                    turned,
                    rstd,
                    rows.stride(0),
                    cos.stride(0),
                    sin.stride(0),
                    tokens,
                    q_tiles,
                    eps,
                    offset,
                    **options,
                    ROUND_BETWEEN=not (round_first and promotes),
                    Q_ROWS=q_rows,
                    K_ROWS=k_rows,
                    num_warps=num_warps,
                    **early_start(qkv),
                )
        ctx.save_for_backward(qkv, *weights, cos, sin, rstd)
        ctx.set_materialize_grads(False)
        ctx.heads, ctx.offset, ctx.per_head, ctx.options = heads, offset, per_head, options
        q, k = turned.split_with_sizes([num_heads, num_kv_heads], 1)
        # Detached, so that autograd does not treat this function's differentiable result as a view of qkv.
        v = qkv.detach()[:, -num_kv_heads * head_dim :].unflatten(1, (num_kv_heads, head_dim))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            return (None,) * 10
        qkv, *weights, cos, sin, rstd = ctx.saved_tensors
        num_heads, num_kv_heads, head_dim = ctx.heads
        tokens = qkv.shape[0]
        heads = num_heads, num_kv_heads, num_kv_heads
        dqkv = torch.empty(tokens, sum(heads), head_dim, dtype=qkv.dtype, device=qkv.device)
        if any(gradient is None for gradient in gradients):
            for gradient, target in zip(gradients, dqkv.split_with_sizes(heads, 1), strict=True):
                if gradient is None:
                    target.zero_()
        want_dweights = any(ctx.needs_input_grad[1:3])
        widths = [0 if weight is None else weight.shape[0] for weight in weights]
        dweights = weights[0].new_empty(sum(widths)) if want_dweights else None
        if tokens:
            _launch_backward(ctx, gradients, qkv, weights, cos, sin, rstd, dqkv, dweights)
        elif dweights is not None:
            dweights.zero_()
        by_weight = (None, None) if dweights is None else dweights.split_with_sizes(widths)
        return dqkv.flatten(1), *by_weight, None, None, None, None, None, None, None


def _launch_backward(ctx, gradients, qkv, weights, cos, sin, rstd, dqkv, dweights):
    sources = [None if x is None else as_heads(x) for x in gradients]
    rows = as_rows(qkv)
    options = ctx.options
    light = options["NORM_FIRST"] and options["ROUND_FIRST"] and 2 * options["HALF"] == ctx.heads[2]
    q_rows, k_rows, num_warps, per_sm, stages = _backward_config(
        ctx.heads, ctx.per_head, _widest_row(options), qkv.element_size(), light
    )
    if gpu_of(rows).amd:
        stages = 1  # there a pipeline's tiles wait in registers
    q_tiles = _tiles(rows.shape[0], ctx.heads[0], q_rows, ctx.per_head)
    k_tiles = _tiles(rows.shape[0], ctx.heads[1], k_rows, ctx.per_head)
    programs = min(q_tiles, num_sms(rows) * per_sm)
    sums = None if dweights is None else rstd.new_empty(programs, dweights.shape[0])
    with on_device_of(rows):
        backward_kernel[(programs,)](
            *sources,
            rows,
            *weights,
            cos,
            sin,
            rstd,
            dqkv,
            sums,
            *(0 if x is None else x.stride(0) for x in sources),
            *(0 if x is None else x.stride(1) for x in sources),
            rows.stride(0),
            cos.stride(0),
            sin.stride(0),
            rows.shape[0],
            q_tiles,
            k_tiles,
            ctx.offset,
            **options,
            Q_ROWS=q_rows,
            K_ROWS=k_rows,
            BLOCK_DIM=next_power_of_2(ctx.heads[2]),
            STAGES=stages,
            num_warps=num_warps,
            **early_start(rows),
        )
        if sums is not None:
            column_sum(sums, dweights)


def _widest_row(options) -> int:
    """Elements of the widest row shared by all heads of a tile: of the tables, or of a part of the weight."""
    return max(options["BLOCK_HALF"], options["BLOCK_REST"])


def _forward_config(heads: tuple[int, int, int], per_head: bool, row: int) -> tuple[int, int, int]:
    """Heads per tile of queries and of keys, and warps. Chosen on an H200.

    With twice as many threads as elements of a shared row, Triton loads the row in the tile's register
    layout. With at most as many threads as elements, each thread gets a few columns of all heads, and the
    tile moves through shared memory before and after: 11% slower for heads of 128. Only heads of 256 are
    faster that way, with few threads.
    """
    num_heads, num_kv_heads, head_dim = heads
    width = next_power_of_2(head_dim)
    if not per_head:
        q_rows, k_rows = _rows_of_whole_tokens(heads)
        return q_rows, k_rows, min(16, max(2, max(q_rows, k_rows) * width // 1024))
    if row != 64:
        rows = max(1, 2048 // width)
        return rows, rows, 2
    most = max(1, 4096 // width)
    q_rows, k_rows = (most if count % most == 0 else most // 2 for count in (num_heads, num_kv_heads))
    return q_rows, k_rows, 4


def _backward_config(
    heads: tuple[int, int, int], per_head: bool, row: int, element_size: int, light: bool
) -> tuple[int, int, int, int, int]:
    """Heads per tile of queries and of keys, warps, programs per multiprocessor, pipeline stages of the
    loads.

    The limit is registers, as for `_norm_kernels.py`, whose configurations these are: with 128 per thread,
    512 threads fit a multiprocessor, and somewhat more if all of a head of up to 128 is rotated after a norm
    that rounds (`light`). A thread has 32 bytes of a tile, and there are twice as many threads as elements of
    a shared row.
    """
    head_dim = heads[2]
    width = next_power_of_2(head_dim)
    if per_head:
        num_warps = min(16, max(4, row // 16))
        rows = max(1, 1024 * num_warps // (width * element_size))
        return rows, rows, num_warps, (20 if light and width <= 128 else 16) // num_warps, 1
    q_rows, k_rows = _rows_of_whole_tokens(heads)
    elements = max(q_rows, k_rows) * width
    if elements <= 4096:
        return q_rows, k_rows, 8, 2, 3
    return q_rows, k_rows, 16, 1, 3 if elements * element_size <= 16384 else 1  # 64 KB of shared memory


def _rows_of_whole_tokens(heads: tuple[int, int, int]) -> tuple[int, int]:
    """Rows of tiles that hold all of a token's queries, and all keys of one or a few tokens.

    There are often far fewer keys: a tile of one token's would leave most threads idle. Half as many rows as
    for queries, since keys of several tokens need as many rows of the tables.
    """
    q_rows, k_rows = next_power_of_2(heads[0]), next_power_of_2(heads[1])
    return q_rows, max(k_rows, q_rows // 2)


def _tiles(tokens: int, heads: int, rows: int, per_head: bool) -> int:
    return ceil_div(tokens * heads, rows) if per_head else ceil_div(tokens, rows // next_power_of_2(heads))
