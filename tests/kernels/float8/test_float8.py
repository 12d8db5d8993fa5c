"""Quantisation to float8, and products of quantised matrices."""

import itertools

import pytest
import torch

from liger_models.kernels import float8_product, quantize
from liger_models.kernels.float8.quantize import ALIGNMENT, DTYPES, Float8, quantize_plain

BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}  # of a significand, with the leading one
SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}  # subnormal number
SIZES = [(1, 16), (17, 128), (130, 260)]
CASES = list(itertools.product(SIZES, DTYPES, [False, True]))


def draw(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows and columns of very different sizes, one row of zeros, and strides that are not a tensor's own."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * columns, generator=generator)[:, ::2]
    x *= torch.randn(rows, 1, generator=generator).exp() * torch.randn(columns, generator=generator).exp()
    x[rows // 2] = 0 if rows > 1 else x[rows // 2]
    return x.to(device, dtype)


def copies(x: torch.Tensor, dtype: torch.dtype, one_scale: bool) -> tuple[Float8, Float8]:
    rows, columns = quantize(x, by_columns=True, dtype=dtype, one_scale=one_scale)
    assert rows is not None
    assert columns is not None
    return rows, columns


def is_power_of_two(x: torch.Tensor) -> bool:
    return bool((torch.frexp(x).mantissa == 0.5).all())


@pytest.mark.parametrize(("size", "dtype", "one_scale"), CASES)
def test_values_are_rounded_once_and_use_the_whole_range(size, dtype, one_scale):
    x = draw(*size)
    for copy, of in zip(copies(x, dtype, one_scale), (x, x.T), strict=True):
        assert copy.values.dtype == dtype
        assert is_power_of_two(copy.scales)
        found, exact = copy.dequantized()[:, : of.shape[1]], of.float()
        # To nearest: half a unit of a normal number, or half the smallest number of this scale.
        bound = torch.maximum(exact.abs() * 2.0 ** -BITS[dtype], copy.scales * SMALLEST[dtype] / 2)
        assert ((found - exact).abs() <= bound).all()
        largest = exact.abs().amax() if one_scale else exact.abs().amax(1)
        within = largest.flatten() / copy.scales.flatten()
        limit = torch.finfo(dtype).max
        assert ((within <= limit) & ((within > limit / 2) | (largest == 0))).all()


def test_columns_are_padded_with_zeros_to_a_width_that_products_take():
    x = draw(17, 32)
    _, columns = copies(x, torch.float8_e4m3fn, False)
    assert columns.values.shape == (32, 2 * ALIGNMENT)
    assert not columns.values[:, 17:].float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("one_scale", [False, True])
def test_what_is_not_finite_stays_visible(value, one_scale):
    x = draw(5, 32)
    x[3, 7] = value
    rows, columns = copies(x, torch.float8_e4m3fn, one_scale)
    assert rows.dequantized()[3].isnan().all()
    assert columns.dequantized()[7, :5].isnan().all()
    assert one_scale or rows.dequantized()[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize(("size", "dtype", "one_scale"), CASES)
def test_the_kernels_are_the_plain_twin(interpreted, size, dtype, one_scale):
    # Numbers of three bits, which float8 holds: the interpreter does not round to it as hardware does.
    mantissa, exponent = torch.frexp(draw(*size).float())
    x = torch.ldexp((mantissa * 8).round() / 8, exponent.clamp(-3, 3))
    plain = quantize_plain(x, True, True, dtype, one_scale)
    for found, expected in zip(copies(x, dtype, one_scale), plain, strict=True):
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.float(), expected.values.float())


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty_matrices(shape):
    rows, columns = copies(torch.zeros(shape), torch.float8_e4m3fn, False)
    assert rows.values.shape == shape
    assert columns.values.shape == (shape[1], -(-shape[0] // ALIGNMENT) * ALIGNMENT)


def test_a_product_is_that_of_the_dequantised_operands():
    a, b = copies(draw(5, 32), torch.float8_e4m3fn, False)[0], copies(draw(16, 32), DTYPES[0], True)[0]
    expected = a.dequantized().double() @ b.dequantized().double().T
    sizes = a.dequantized().double().abs() @ b.dequantized().double().abs().T
    apart = (float8_product(a, b, torch.float32).double() - expected).abs()
    assert (apart <= 32 * 2.0**-24 * sizes).all()  # a sum of 32 terms in float32


def test_sizes_that_float8_products_lack_are_refused():
    a, b = (copies(draw(5, width), torch.float8_e4m3fn, False)[0] for width in (32, 24))
    with pytest.raises(ValueError, match="multiples of 16"):
        float8_product(a, a)
    with pytest.raises(ValueError, match="multiples of 16"):
        float8_product(b, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dtype", "one_scale"), [*CASES, ((4096, 14336), DTYPES[0], False)])
def test_compiled_kernels_give_the_plain_twins_bits(size, dtype, one_scale):
    x = draw(*size, device="cuda")
    plain = quantize_plain(x, True, True, dtype, one_scale)
    for found, expected in zip(copies(x, dtype, one_scale), plain, strict=True):
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("dtypes", [(DTYPES[0], DTYPES[0]), (DTYPES[1], DTYPES[0])])
def test_products_on_a_gpu_are_those_of_the_quantised_operands(dtypes, one_scale):
    """Fast accumulation keeps sums with at least 13 bits, of which each of k / 32 additions may lose one; the
    result is rounded to bfloat16.
    """
    if dtypes[0] != dtypes[1] and not one_scale:
        pytest.skip("gradients in e5m2 have one scale")
    m, n, k = 300, 512, 4096
    a, b = (
        copies(draw(rows, k, "cuda"), dtype, one_scale)[0] for rows, dtype in zip((m, n), dtypes, strict=True)
    )
    exact = a.dequantized().double() @ b.dequantized().double().T
    sizes = a.dequantized().double().abs() @ b.dequantized().double().abs().T
    apart = (float8_product(a, b).double() - exact).abs()
    assert (apart <= 2.0**-8 * exact.abs() + k / 32 * 2.0**-13 * sizes).all()
