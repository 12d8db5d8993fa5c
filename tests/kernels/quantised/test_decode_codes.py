"""Decoding of stacks of quantised matrices: the kernel and its plain twin give the bits of the formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_models.kernels import decode_codes
from liger_models.kernels.quantised.decode_codes import decode_codes_plain

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
LOW, HIGH = "low half first", "high half first"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of float4
# numbers, rows and columns, block, dtype of scales, options
CASES = {
    "float8 blocks": ("float8", (50, 70), (32, 24), torch.float32, ()),
    "float8, a matrix": ("float8", (9, 1100), (9, 1100), E8M0, ()),
    "float8, a column": ("float8", (40, 33), (40, 1), torch.bfloat16, ()),
    "mxfp4": ("float4", (64, 96), (1, 32), E8M0, ()),
    "nvfp4, multiplied": ("float4", (8, 1088), (1, 16), E4M3, ("second",)),
    "nvfp4, divided": ("float4", (64, 96), (1, 16), E4M3, ("second", "divides")),
    "int4, odd groups": ("int4", (13, 33), (1, 11), torch.bfloat16, ("zero",)),
    "a table, ordered": (LOW, (13, 33), (1, 11), torch.float16, ("zero", "groups")),
    "int4, padded": ("int4", (13, 33), (1, 33), torch.float32, ("padding",)),
    "nf4": (HIGH, (1, 64 * 33), (1, 64), torch.float32, ("tables",)),
    "int8": ("int8", (13, 33), (1, 33), torch.float32, ("factor",)),
    "int8 in words": ("biased int8", (13, 33), (13, 8), torch.float16, ("zero", "groups")),
}


def draw(case, device="cpu", count=3):
    numbers, (rows, columns), block, dtype, flags = CASES[case]
    generator = torch.Generator().manual_seed(0)
    halves = numbers in (LOW, HIGH, "float4", "int4")
    width = (-(-columns // 2) if halves else columns) + 3 * ("padding" in flags)
    codes = torch.randint(0, 256, (count, rows, width), dtype=torch.uint8, generator=generator)
    codes.view(-1)[: min(codes.numel(), 256)] = torch.arange(256, dtype=torch.uint8)[: codes.numel()]
    grid = count, -(-rows // block[0]), -(-columns // block[1])
    if dtype in (E8M0, E4M3):
        top = 240 if dtype == E8M0 else 126
        scale = torch.randint(0, top + 1, grid, dtype=torch.uint8, generator=generator).view(dtype)
        scale.view(torch.uint8).view(-1)[0] = 0
    else:
        scale = torch.rand(grid, generator=generator).to(dtype)
    options = {"divides": "divides" in flags, "factor": 1 / 127 if "factor" in flags else None}
    if numbers in (LOW, HIGH):
        options["table"] = torch.randn(count if "tables" in flags else 1, 16, generator=generator)
    if "second" in flags:
        options["second"] = torch.rand(count, generator=generator) * 1000 + 1
    if "zero" in flags:
        options["zero"] = torch.randint(-8, 8, grid, generator=generator).float()
    if "groups" in flags:
        options["groups"] = torch.randint(
            0, grid[2], (count, columns), dtype=torch.int32, generator=generator
        )
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return (codes.to(device), scale.to(device), (rows, columns), block, numbers), options


def same_values(a, b):
    assert a.dtype == b.dtype
    bits = torch.int32 if a.itemsize == 4 else torch.int16
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def one_by_one(codes, scale, shape, block, numbers, **options):
    """The formula, element by element, in Python's numbers of double precision where these are exact."""
    (rows, columns), out = shape, torch.empty(len(codes), *shape)
    for m, i, j in itertools.product(range(len(codes)), range(rows), range(columns)):
        groups = options.get("groups")
        place = i // block[0], j // block[1] if groups is None else int(groups[m, j])
        if "table" in options:
            byte = int(codes[m, i, j // 2])
            number = options["table"][
                m % len(options["table"]), byte >> 4 if (j % 2 == 1) == (numbers == LOW) else byte & 15
            ]
        elif numbers in ("float4", "int4"):
            code = int(codes[m, i, j // 2]) >> 4 * (j % 2) & 15
            sign = -1.0 if code > 7 else 1.0
            number = torch.tensor(code - 8.0 if numbers == "int4" else sign * MAGNITUDES[code % 8])
        else:
            byte = codes[m, i, j]
            number = {
                "float8": byte.view(E4M3).float(),
                "int8": byte.view(torch.int8).float(),
                "biased int8": byte.float() - 128,
            }[numbers]
        factor = scale[m][place].float()
        if (second := options.get("second")) is not None:
            factor = factor / second[m] if options["divides"] else factor * second[m]
        if (zero := options.get("zero")) is not None:
            number = number - zero[m][place]
        value = number * factor
        out[m, i, j] = value if options["factor"] is None else value * options["factor"]
    return out


@pytest.mark.parametrize(
    "case", [name for name in CASES if name not in ("float8, a matrix", "nvfp4, multiplied")]
)
def test_the_twin_is_the_formula(case):
    operands, options = draw(case, count=2)
    found = decode_codes_plain(*operands, torch.float32, **options)
    assert same_values(found, one_by_one(*operands, **options))
    # Rounded once.
    assert same_values(decode_codes_plain(*operands, torch.bfloat16, **options), found.bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_the_bits_of_its_twin(case, interpreted):
    operands, options = draw(case)
    found = decode_codes(*operands, torch.float32, **options)
    assert same_values(found, decode_codes_plain(*operands, torch.float32, **options))


def test_no_rows_and_strided_codes(interpreted):
    (codes, scale, shape, *rest), options = draw("mxfp4")
    found = decode_codes(codes[:0], scale[:0], shape, *rest, torch.float32, **options)
    assert found.shape == (0, *shape)
    wide = codes.repeat_interleave(2, -1)
    again = decode_codes(wide[..., ::2], scale, shape, *rest, torch.float32, **options)
    assert same_values(again, decode_codes(codes, scale, shape, *rest, torch.float32, **options))


def test_operands_that_do_not_fit_are_errors():
    (codes, scale, shape, block, numbers), options = draw("mxfp4")
    with pytest.raises(TypeError, match=r"expected their bytes"):
        decode_codes(codes.float(), scale, shape, block, numbers, torch.float32, **options)
    with pytest.raises(
        TypeError, match=r"scales are torch.float8_e8m0fnu, and the result is to be torch.int8"
    ):
        decode_codes(codes, scale, shape, block, numbers, torch.int8, **options)
    with pytest.raises(ValueError, match=r"codes are \(3, 64, 48\); expected \(3, 64, 49\)"):
        decode_codes(codes, scale, (64, 98), block, numbers, torch.float32, **options)
    with pytest.raises(ValueError, match=r"scale is \(3, 64, 3\); expected \(3, 64, 6\)"):
        decode_codes(codes, scale, shape, (1, 16), numbers, torch.float32, **options)
    with pytest.raises(ValueError, match="without a table"):
        decode_codes(codes, scale, shape, block, LOW, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_kernel_gives_the_bits_of_its_twin(case, dtype):
    operands, options = draw(case, "cuda")
    on_host, host_options = draw(case)
    found = decode_codes(*operands, dtype, **options)
    assert same_values(found.cpu(), decode_codes_plain(*on_host, dtype, **host_options))


@pytest.mark.gpu
def test_offsets_of_large_stacks_do_not_wrap():
    codes = torch.zeros(33, 8192, 4096, dtype=torch.uint8, device="cuda")  # 2.2e9 elements
    codes[-1, -1, -1] = 0x70
    scale = torch.full((33, 8192, 256), 127, dtype=torch.uint8, device="cuda").view(E8M0)
    table = torch.arange(16.0, device="cuda")[None]
    dense = decode_codes(codes, scale, (8192, 8192), (1, 32), LOW, torch.bfloat16, table=table)
    assert dense[-1, -1, -1].item() == 7
    assert int(dense.count_nonzero()) == 1
