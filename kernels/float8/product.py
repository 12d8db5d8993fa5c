"""Product of two float8 matrices, y = (s_a s_b^T) * (q_a q_b^T).

Runs on float8 matrix units (NVIDIA's from compute capability 8.9) through torch._scaled_mm, with float32 sums
of less precision ("fast accumulation"). Traffic at the least: one byte for each element of a and b, and the
result.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from liger_models.kernels._dispatch import interpreted
from liger_models.kernels.float8.quantize import ALIGNMENT, Float8


def float8_product(a: Float8, b: Float8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a @ b^T.

    Args:
        a: [M, K], with a scale for each row or one for all.
        b: [N, K], likewise.
        dtype: of the result.

    Returns:
        [M, N].

    Raises:
        ValueError: K or N is not a multiple of 16, or the widths differ.
    """
    (m, k), (n, width) = a.values.shape, b.values.shape
    if k != width or k % ALIGNMENT or n % ALIGNMENT:
        found = f"a is {(m, k)}, b {(n, width)}"
        raise ValueError(
            f"{found}; expected equal widths, which with b's height are multiples of {ALIGNMENT}"
        )
    if not a.values.is_cuda or not m:
        return float8_product_plain(a, b, dtype)
    return torch._scaled_mm(a.values, b.values.T, a.scales, b.scales.T, out_dtype=dtype, use_fast_accum=True)


def float8_product_plain(a: Float8, b: Float8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Plain twin of `float8_product`, with float32 sums of the dequantised values."""
    return (a.dequantized() @ b.dequantized().T).to(dtype)


def has_float8_products(device: torch.device) -> bool:
    """Whether this device has float8 matrix units that torch can use with a scale for each row."""
    if device.type != "cuda" or torch.version.cuda is None or interpreted:
        return False
    return _capability(device.index) >= (9, 0)


@functools.cache
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
