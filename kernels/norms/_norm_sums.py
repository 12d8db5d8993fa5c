"""Shared parts of the norm kernels: 1 / sqrt(mean square), and adding up the programs' sums."""

from __future__ import annotations

from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, early_start, jit, tl, wait_for_inputs


def column_sum(sums: Tensor, *results: Tensor) -> None:
    """Write the sums over the rows of float32 `sums` [results, programs, H] into each result [H].

    Takes one or two results; for one, `sums` may be [programs, H]. Launches on the current GPU.
    """
    rows, width = sums.shape[-2:]
    first, second = results if len(results) == 2 else (*results, None)
    block_rows, block_width, warps = (512, 16, 8) if rows > 64 else (64, 64, 4)
    _column_sum_kernel[(ceil_div(width, block_width), len(results))](
        sums,
        first,
        second,
        rows,
        width,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        num_warps=warps,
        **early_start(sums),
    )


@jit
def rstd_of(sum_of_squares, width, eps):
    # Correctly rounded, unlike tl.sqrt and /: an error here would affect the whole row.
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, width * 1.0) + eps))


@jit
def _column_sum_kernel(
    sums,
    first,
    second,
    rows,
    width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    EARLY_START: tl.constexpr,
):
    wait_for_inputs(EARLY_START)
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    sums += tl.program_id(1).to(tl.int64) * rows * width
    # In float64, so that only the programs' own sums round; there are too few of them for the cost to matter.
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        value = tl.load(sums + row * width + column, (row < rows) & (column < width), 0.0)
        accumulated += value.to(tl.float64)
    total = tl.sum(accumulated, 0, keep_dims=True).to(tl.float32)
    if tl.program_id(1) == 0:
        tl.store(first + column, total.to(first.dtype.element_ty), column < width)
    elif second is not None:
        tl.store(second + column, total.to(second.dtype.element_ty), column < width)
