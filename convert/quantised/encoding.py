"""Quantisation of dense weights: float8 and float4 in blocks.

    scale = amax / largest code, of each block        code = weight / scale, rounded to nearest even

Scales that are exponents are rounded up to a power of two for float8, so that nothing overflows; for float4
they follow the OCP Microscaling specification (1.0, section 6.3): 2^(floor(log2 amax) - 2). With two
levels of scales, the blocks' scales are in float8, and the second one makes use of its range.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from liger_models.convert.errors import UnsupportedModelError
from liger_models.convert.quantised.bitnet import ThreeValues
from liger_models.convert.quantised.codes import FLOAT4, FLOAT8, MAGNITUDES, as_scale
from liger_models.convert.quantised.formats import CODES, SCALE, SECOND, Blocks, Format

LARGEST_FLOAT8, LARGEST_FLOAT4 = 448.0, 6.0


@torch.no_grad()
def encode(format: Format, dense: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Quantise a matrix or a stack of them [..., rows, columns].

    Args:
        scale_dtype: of the scales of blocks.

    Returns:
        The parts of the weight: codes [..., rows, words], scales [..., rows of blocks, columns of blocks],
        and the second scales [...].

    Raises:
        UnsupportedModelError: only reading is supported for the format.
    """
    if isinstance(format, ThreeValues):
        raise UnsupportedModelError(
            "weights of three values have changed, and the checkpoint holds no others; train the master "
            "weights of the same model, whose quantization_config has quantization_mode 'online', or adapters"
        )
    if not isinstance(format, Blocks) or format.codes not in (FLOAT8, FLOAT4) or format.factor is not None:
        raise UnsupportedModelError(
            f"weights that have changed cannot be written in the format '{format.label}'; write them dense, "
            "or in 'fp8-block', 'mxfp4' or 'nvfp4'"
        )
    weight = dense.float()
    rows, columns = weight.shape[-2:]
    high, wide = format.grid(weight.shape)
    height, width = format.block[0] or rows, format.block[1] or columns
    padding = (0, wide * width - columns, 0, high * height - rows)
    blocks = (
        torch.nn.functional.pad(weight, padding).unflatten(-1, (wide, width)).unflatten(-3, (high, height))
    )
    amax = blocks.abs().amax((-3, -1))  # [..., rows of blocks, columns of blocks]
    largest = LARGEST_FLOAT8 if format.codes is FLOAT8 else LARGEST_FLOAT4
    parts, scale = _scales(format, amax, largest, scale_dtype)
    spread = scale.repeat_interleave(height, -2)[..., :rows, :]
    spread = spread.repeat_interleave(width, -1)[..., :columns]
    codes = torch.where(spread > 0, weight / spread, 0.0)
    if format.codes is FLOAT8:
        return {CODES: codes.clamp(-largest, largest).to(torch.float8_e4m3fn), **parts}
    return {CODES: _pairs(codes), **parts}


def _scales(
    format: Blocks, amax: Tensor, largest: float, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """The scales as they are stored, and as float32 factors of codes."""
    wanted = torch.where(amax > 0, amax / largest, 1.0)
    if format.second is not None:
        top = amax.amax((-2, -1))
        factor = torch.where(top > 0, top / (largest * LARGEST_FLOAT8), 1.0)[..., None, None]
        stored = torch.where(amax > 0, wanted / factor, 0.0).clamp(max=LARGEST_FLOAT8).to(dtype)
        second = factor if format.second == "times" else 1 / factor
        whole = stored.float() * second if format.second == "times" else stored.float() / second
        return {SCALE: stored, SECOND: second[..., 0, 0]}, whole
    if dtype not in (torch.uint8, torch.float8_e8m0fnu):
        stored = wanted.to(dtype)
    elif format.codes is FLOAT8:
        mantissa, exponent = torch.frexp(wanted)  # mantissas from 0.5
        stored = _exponents(torch.where(mantissa > 0.5, exponent, exponent - 1)).view(dtype)
    else:
        exponent = torch.frexp(amax).exponent - 1 - 2
        stored = _exponents(torch.where(amax > 0, exponent, 0)).view(dtype)
    return {SCALE: stored}, as_scale(stored)


def _exponents(power: Tensor) -> Tensor:
    return (power + 127).clamp(0, 254).to(torch.uint8)


def _pairs(numbers: Tensor) -> Tensor:
    """The nearest codes of float4, ties to even, in bytes: the first of two in the low half."""
    size, code = numbers.abs(), torch.zeros_like(numbers, dtype=torch.uint8)
    for below, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (low + high) / 2
        code += size >= middle if below % 2 else size > middle
    code |= torch.signbit(numbers).to(torch.uint8) << 3  # -0.0 keeps its sign
    if code.shape[-1] % 2:
        code = torch.nn.functional.pad(code, (0, 1))
    return code[..., 0::2] | code[..., 1::2] << 4
