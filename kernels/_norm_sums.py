"""What the norms' kernels have in common: 1 / sqrt(mean square), and adding up what each program summed."""

from __future__ import annotations

from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, tl


def column_sum(sums: Tensor, result: Tensor) -> None:
    """Write the sums over the rows of float32 `sums` [programs, H] into `result` [H]; on the current GPU."""
    rows, width = sums.shape
    _column_sum_kernel[(ceil_div(width, 64),)](sums, result, rows, width, BLOCK_ROWS=64, BLOCK_WIDTH=64)


@jit
def rstd_of(sum_of_squares, width, eps):
    # Correctly rounded, unlike tl.sqrt and /: an error here would be common to the whole row.
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, width * 1.0) + eps))


@jit
def _column_sum_kernel(sums, result, rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    # In float64, so that only the programs' own sums round; there are too few of them to cost anything.
    accumulated = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)[:, None].to(tl.int64)
        value = tl.load(sums + row * width + column, (row < rows) & (column < width), 0.0)
        accumulated += value.to(tl.float64)
    total = tl.sum(accumulated, 0, keep_dims=True).to(tl.float32)
    tl.store(result + column, total.to(result.dtype.element_ty), column < width)
