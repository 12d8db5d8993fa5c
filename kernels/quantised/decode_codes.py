"""Decode stacks of quantised matrices to dense ones.

    y[m, i, j] = (code[m, i, j] - zero[m, b]) * scale[m, b]        b = (i // height, j // width), a block

in float32, rounded once, to the dtype of y. A second scale of each matrix multiplies or divides its scales
first. Codes are float8 (e4m3), integers of 8 bits, or halves of a byte: float4 (e2m1), int4, or those that a
table of 16 numbers decodes, such as nf4 (QLoRA: Dettmers et al., 2023, arXiv:2305.14314). Scales may be
exponents (OCP Microscaling, version 1.0, section 5.4: 2^(byte - 127)) or float8.

At the least, the codes and the scales are read once and y is written once: for float4 in groups of 32
0.53 + 2 bytes an element. There is no gradient: such weights are frozen.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    use_triton,
)

Numbers = Literal["float8", "int8", "biased int8", "float4", "int4", "low half first", "high half first"]

_TILE = 2048  # bytes that a program decodes
AT_ONCE = 2**24  # elements that the plain twin decodes at once: 64 MB in float32
_BY_TABLE = ("low half first", "high half first")
_HALVES = (*_BY_TABLE, "float4", "int4")
_SCALES = {torch.float8_e4m3fn: "float8", torch.float8_e8m0fnu: "exponent"}


def decode_codes(
    codes: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    block: tuple[int, int],
    numbers: Numbers,
    dtype: torch.dtype,
    *,
    table: Tensor | None = None,
    second: Tensor | None = None,
    divides: bool = False,
    zero: Tensor | None = None,
    groups: Tensor | None = None,
    factor: float | None = None,
) -> Tensor:
    """Decode M matrices.

    Args:
        codes: [M, rows, bytes of a row], uint8; rows may end in padding.
        scale: [M, blocks down, blocks across], in float32, bfloat16, float16, float8_e4m3fn or
            float8_e8m0fnu. The last blocks may be cut off by the end of the matrix.
        shape: rows and columns of each matrix.
        block: height and width of a block.
        numbers: what the codes are. "biased int8" is 128 more than the number, "int4" 8 more. Of "float4" and
            "int4" the low half of a byte comes first.
        dtype: of the result: float32, bfloat16 or float16.
        table: [M, 16] or [1, 16], float32: the numbers of half bytes, if only their order is named.
        second: [M], float32, a factor of each matrix's scales, or with `divides` their divisor.
        zero: [M, blocks down, blocks across], float32, subtracted from the codes' numbers.
        groups: [M, columns], int32: the block across of each column, which need not be in order.
        factor: of all values, multiplied last.

    Returns:
        [M, rows, columns], contiguous.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: codes that are not uint8, or another dtype of scales or of the result.
    """
    _check(codes, scale, shape, block, numbers, dtype, table)
    count, (rows, columns) = len(codes), shape
    out = torch.empty(count, rows, columns, dtype=dtype, device=codes.device)
    if not use_triton(out, codes, scale, table, second, zero, groups):
        _decode_plain(out, codes, scale, block, numbers, table, second, divides, zero, groups, factor)
        return out
    if out.numel() == 0:
        return out
    codes, scale = codes.contiguous(), scale.contiguous()
    kind, (*_, down, across) = _SCALES.get(scale.dtype, "number"), scale.shape
    used = _bytes_of(columns, numbers)
    halves = numbers in _HALVES
    whole = block[0] == 1 and across > 1 and across * block[1] == columns and groups is None
    if whole and used == codes.shape[-1] == columns // (2 if halves else 1) and rows * used < 2**29:
        # Rows of whole blocks follow one another like one long row.
        rows, columns, used, down, across = 1, rows * columns, rows * used, 1, rows * across
    # A single block along a dimension is the constant 0, so that matrices of all sizes share one kernel.
    height, width = block[0] if down > 1 else 0, block[1] if across > 1 else 0
    # A thread decodes as many bytes as make 16 of bfloat16, if they share a scale.
    chunk, in_block = 4 if halves else 8, width // 2 if halves and width % 2 == 0 else width
    while in_block % chunk or (groups is not None and chunk > 1):
        chunk //= 2
    most = _TILE if rows == 1 else 512
    bytes_of_tile = max(chunk, next_power_of_2(min(used, most)))
    tile = max(1, _TILE // bytes_of_tile), bytes_of_tile // chunk
    tiles = ceil_div(rows, tile[0]) * ceil_div(used, bytes_of_tile)
    with on_device_of(out):
        _decode_kernel[tiles, count](
            codes,
            scale if kind == "number" else scale.view(torch.uint8),
            None if second is None else second.contiguous(),
            None if zero is None else zero.contiguous(),
            None if groups is None else groups.contiguous(),
            None if table is None else table.contiguous(),
            out,
            *(rows, columns, used, used if rows == 1 else codes.shape[-1], down, across),
            0 if table is None or len(table) == 1 else 16,
            1.0 if factor is None else factor,
            NUMBERS=numbers,
            SCALE=kind,
            SECOND="" if second is None else "divides" if divides else "times",
            HAS_ZERO=zero is not None,
            HAS_GROUPS=groups is not None,
            HAS_FACTOR=factor is not None,
            HEIGHT=height,
            WIDTH=width,
            ROWS=tile[0],
            CHUNKS=tile[1],
            CHUNK=chunk,
        )
    return out


def decode_codes_plain(
    codes: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    block: tuple[int, int],
    numbers: Numbers,
    dtype: torch.dtype,
    *,
    table: Tensor | None = None,
    second: Tensor | None = None,
    divides: bool = False,
    zero: Tensor | None = None,
    groups: Tensor | None = None,
    factor: float | None = None,
) -> Tensor:
    """Plain twin of `decode_codes`."""
    _check(codes, scale, shape, block, numbers, dtype, table)
    out = torch.empty(len(codes), *shape, dtype=dtype, device=codes.device)
    _decode_plain(out, codes, scale, block, numbers, table, second, divides, zero, groups, factor)
    return out


def _decode_plain(
    out: Tensor,
    codes: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    numbers: Numbers,
    table: Tensor | None,
    second: Tensor | None,
    divides: bool,
    zero: Tensor | None,
    groups: Tensor | None,
    factor: float | None,
) -> None:
    (count, rows, columns), (height, width) = out.shape, block
    step = max(1, AT_ONCE // max(columns, 1))
    for m in range(count):
        factors, of_column = scale[m].float(), torch.arange(columns, device=out.device) // width
        if second is not None:
            factors = factors / second[m] if divides else factors * second[m]
        if groups is not None:
            of_column = groups[m].long()
        for top in range(0, rows, step):
            of_row = torch.arange(top, min(top + step, rows), device=out.device) // height
            stored = codes[m, top : top + step]
            values = _numbers(stored, numbers, None if table is None else table[m % len(table)])[:, :columns]
            if zero is not None:
                values = values - zero[m][of_row][:, of_column]
            values = values * factors[of_row][:, of_column]
            out[m, top : top + step] = values if factor is None else values * factor


def _numbers(stored: Tensor, numbers: Numbers, table: Tensor | None) -> Tensor:
    """The float32 numbers of the codes uint8 [rows, bytes] of some rows."""
    if table is not None:
        low, high = table[(stored & 15).int()], table[(stored >> 4).int()]
        return torch.stack((low, high) if numbers == "low half first" else (high, low), -1).flatten(1)
    if numbers in ("float4", "int4"):
        halves = torch.stack((stored & 15, stored >> 4), -1).flatten(1).int()
        return _float4_plain(halves) if numbers == "float4" else halves.float() - 8.0
    if numbers == "float8":
        return stored.contiguous().view(torch.float8_e4m3fn).float()
    return stored.contiguous().view(torch.int8).float() if numbers == "int8" else stored.float() - 128.0


def _float4_plain(codes: Tensor) -> Tensor:
    """Float32 of float4 codes (e2m1), int32: exponent and mantissa move to the lowest and highest bits of
    float32's.
    """
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.view(torch.float32) * 2.0**126  # 2^(127 - 1)


def _check(
    codes: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    block: tuple[int, int],
    numbers: str,
    dtype: torch.dtype,
    table: Tensor | None,
) -> None:
    (rows, columns), (height, width) = shape, block
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes are {codes.dtype}; expected their bytes, torch.uint8")
    known = (torch.float32, torch.bfloat16, torch.float16, *_SCALES)
    if scale.dtype not in known or dtype not in known[:3]:
        raise TypeError(
            f"scales are {scale.dtype}, and the result is to be {dtype}; expected scales in "
            f"{', '.join(map(str, known))}, and one of the first three"
        )
    stored = len(codes), rows, _bytes_of(columns, numbers)
    if codes.dim() != 3 or codes.shape[1] != rows or codes.shape[2] < stored[2]:
        raise ValueError(f"codes are {tuple(codes.shape)}; expected {stored} of {numbers} for {shape}")
    across = scale.shape[-1] if scale.dim() == 3 else 0  # in groups of columns, as many as there are
    grid = len(codes), -(-rows // height), max(across, -(-columns // width))
    if scale.shape != grid:
        raise ValueError(f"scale is {tuple(scale.shape)}; expected {grid} for blocks of {block} of {shape}")
    if codes.shape[-1] >= 2**30:
        raise ValueError(f"rows of {columns} columns are too long; expected fewer than 2^30 bytes")
    if (numbers in _BY_TABLE) != (table is not None):
        raise ValueError(f"the numbers are {numbers!r}, {'with' if table is not None else 'without'} a table")


def _bytes_of(columns: int, numbers: str) -> int:
    return -(-columns // 2) if numbers in _HALVES else columns


@jit
def _float8(stored):
    """Float32 of the bytes of float8 (e4m3): its exponent moves to the lowest bits of float32's."""
    bits = ((stored & 127) << 20) | ((stored & 128) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^(127 - 7)
    return tl.where((stored & 127) == 127, float("nan"), value)


@jit
def _float4(stored):
    """Float32 of the low halves of bytes as float4 (e2m1)."""
    bits = ((stored & 7) << 22) | ((stored & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2^(127 - 1)


@jit
def _factor_of(scale, second, place, inside, SCALE: tl.constexpr, SECOND: tl.constexpr):
    """The float32 scales at these places."""
    stored = tl.load(scale + place, inside, 0)
    if SCALE == "number":
        value = stored.to(tl.float32)
    elif SCALE == "float8":
        value = _float8(stored.to(tl.int32))
    else:
        bits = stored.to(tl.int32) << 23
        value = tl.where(bits == 0, 4194304, bits).to(tl.float32, bitcast=True)  # 0 is 2^-127, a subnormal
    if SECOND == "times":
        value = value * second
    elif SECOND == "divides":
        value = tl.div_rn(value, tl.zeros_like(value) + second)
    return value


@jit
def _block_of(column, groups, matrix, columns, HAS_GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The block of each column, counted along the row."""
    if HAS_GROUPS:
        block = tl.load(groups + matrix * columns + column, column < columns, 0)
    elif WIDTH > 0:
        block = column // WIDTH
    else:
        block = tl.zeros_like(column)
    return block


@jit
def _decode_kernel(
    codes,
    scale,
    second,
    zero,
    groups,
    table,
    out,
    rows,
    columns,
    row_bytes,
    stride,
    down,
    across,
    table_stride,
    factor,
    NUMBERS: tl.constexpr,
    SCALE: tl.constexpr,
    SECOND: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,  # bytes of a row that share a scale, and that one thread decodes
):
    BY_TABLE: tl.constexpr = NUMBERS == "low half first" or NUMBERS == "high half first"
    HALVES: tl.constexpr = BY_TABLE or NUMBERS == "float4" or NUMBERS == "int4"
    EACH: tl.constexpr = 2 if HALVES else 1
    matrix = tl.program_id(1).to(tl.int64)
    across_tiles = tl.cdiv(row_bytes, CHUNKS * CHUNK)
    row = (tl.program_id(0) // across_tiles) * ROWS + tl.arange(0, ROWS)
    begin = ((tl.program_id(0) % across_tiles) * CHUNKS + tl.arange(0, CHUNKS)) * CHUNK
    byte = begin[:, None] + tl.arange(0, CHUNK)[None, :]
    lines = matrix * rows + row  # of all matrices
    inside = (row < rows)[:, None, None] & (byte < row_bytes)[None, :, :]
    stored = tl.load(codes + (lines * stride)[:, None, None] + byte[None, :, :], inside, 0).to(tl.int32)
    of_matrix = 1.0
    if SECOND != "":
        of_matrix = tl.load(second + matrix)
    blocks = matrix * down  # the first of each row's blocks
    if HEIGHT > 0:
        blocks += row // HEIGHT
    blocks = (blocks + tl.zeros_like(row)) * across
    begins = (row < rows)[:, None] & (begin < row_bytes)[None, :]
    block = _block_of(EACH * begin, groups, matrix, columns, HAS_GROUPS, WIDTH)
    place = blocks[:, None] + block[None, :]
    scales = _factor_of(scale, of_matrix, place, begins, SCALE, SECOND)[:, :, None]
    zeros = 0.0
    if HAS_ZERO:
        zeros = tl.load(zero + place, begins, 0.0)[:, :, None]
    if HALVES:
        if NUMBERS == "float4":
            low, high = _float4(stored), _float4(stored >> 4)
        elif NUMBERS == "int4":
            low, high = ((stored & 15) - 8).to(tl.float32), ((stored >> 4) - 8).to(tl.float32)
        else:
            numbers = table + matrix * table_stride
            low, high = tl.load(numbers + (stored & 15)), tl.load(numbers + (stored >> 4))
        if NUMBERS == "high half first":
            low, high = high, low
        of_high, zeros_of_high = scales, zeros
        if HAS_GROUPS or WIDTH % 2 == 1:  # the halves of a byte may be in two blocks
            column = EACH * begin + 1
            block = _block_of(column, groups, matrix, columns, HAS_GROUPS, WIDTH)
            place = blocks[:, None] + block[None, :]
            begins = begins & (column < columns)[None, :]
            of_high = _factor_of(scale, of_matrix, place, begins, SCALE, SECOND)[:, :, None]
            if HAS_ZERO:
                zeros_of_high = tl.load(zero + place, begins, 0.0)[:, :, None]
        if HAS_ZERO:
            low, high = low - zeros, high - zeros_of_high
        value = tl.reshape(tl.join(low * scales, high * of_high), (ROWS, CHUNKS, EACH * CHUNK))
    else:
        if NUMBERS == "float8":
            value = _float8(stored)
        elif NUMBERS == "int8":
            value = stored.to(tl.int8).to(tl.float32)
        else:
            value = (stored - 128).to(tl.float32)
        if HAS_ZERO:
            value = value - zeros
        value = value * scales
    if HAS_FACTOR:
        value = value * factor
    column = EACH * begin[:, None] + tl.arange(0, EACH * CHUNK)[None, :]
    inside = (row < rows)[:, None, None] & (column < columns)[None, :, :]
    into = out + (lines * columns)[:, None, None] + column[None, :, :]
    tl.store(into, value.to(out.dtype.element_ty), inside)
