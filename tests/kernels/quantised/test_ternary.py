"""Rounding of operands to 8 bits and to three values: the kernels have the bits of their plain twins, which
follow the formula.
"""

from __future__ import annotations

import pytest
import torch

from liger_models.kernels import round_inputs, round_weights, weight_scales
from liger_models.kernels.quantised import ternary
from liger_models.kernels.quantised.ternary import round_inputs_plain, round_weights_plain

HEIGHTS = (5, 2, 4)


def same_bits(found, expected):
    """Equal, the signs of zeros included; NaN equals NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    real = ~expected.isnan()
    assert torch.equal(found.signbit() & real, expected.signbit() & real)


def rows_to_round(columns, dtype, device="cpu"):
    """Rows of several magnitudes, with ties, zeros of both signs, an infinity and a NaN."""
    x = torch.randn(9, columns, dtype=torch.float64) * 10.0 ** torch.arange(-7, 2)[:, None]
    x[1] = torch.linspace(-127, 127, columns)
    x[1, 0], x[1, 1:4] = 127, torch.tensor([0.5, 1.5, -2.5])  # a scale of one
    x[2] = 0
    x[3, 1], x[4, 2], x[5, 3] = -0.0, float("inf"), float("nan")
    return x.to(device, dtype)


def weights_to_round(columns, dtype, device="cpu"):
    """Parts with means of several magnitudes: one, ties in the middle one, and almost zero in the last."""
    weight = torch.randn(sum(HEIGHTS), columns, dtype=torch.float64)
    weight[0, :2] = torch.tensor([0.0, -0.0])
    weight[5:7] = torch.tensor([0.5, -1.5]).repeat(columns)[:columns]
    weight[7:] *= 1e-6
    return weight.to(device, dtype)


def assert_kernels_have_the_bits_of_the_twins(columns, dtype, out, device="cpu"):
    x, weight = rows_to_round(columns, dtype, device), weights_to_round(columns, dtype, device)
    same_bits(round_inputs(x, out), round_inputs_plain(x, out or dtype))
    wide = torch.cat([x, x], 1)[:, :columns]  # rows that lie apart
    same_bits(
        round_inputs(wide.view(3, 3, columns), out), round_inputs_plain(wide, out or dtype).view(3, 3, -1)
    )
    scales = weight_scales(weight, HEIGHTS)
    expected = round_weights_plain(weight, HEIGHTS, out or dtype, scales)
    same_bits(round_weights(weight, HEIGHTS, out), expected)
    same_bits(round_weights(weight.T.contiguous().T, HEIGHTS, out, scales), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of NumPy, at the infinity and the NaN
@pytest.mark.parametrize("columns", [40, 64, 70])
@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.float32, None), (torch.float16, None), (torch.float32, torch.float16)]
)
def test_kernels_have_the_bits_of_the_twins(columns, dtype, out, interpreted, monkeypatch):
    monkeypatch.setattr(ternary, "_WIDEST", 64)
    monkeypatch.setattr(ternary, "_BLOCK", 256)
    assert_kernels_have_the_bits_of_the_twins(columns, dtype, out)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [70, 2560, 6912, 20000])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        *((torch.bfloat16, None), (torch.float16, None), (torch.float32, None)),
        *((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)),
    ],
)
def test_kernels_have_the_bits_of_the_twins_on_a_gpu(columns, dtype, out):
    assert_kernels_have_the_bits_of_the_twins(columns, dtype, out, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(640, 2560), (6912, 2560), (2560, 6912), (37, 333)])
def test_means_are_as_exact_as_of_a_copy_in_float32_on_a_gpu(dtype, shape):
    """Both are sums in float32, of other numbers of terms at once."""
    weight = torch.randn(shape, device="cuda", dtype=dtype)
    (scale,) = weight_scales(weight, (len(weight),))
    true = 1 / weight.double().abs().mean().item()
    # A thread adds a few hundred terms one by one; independent roundings grow as the root of their number.
    bound = 256**0.5 * torch.finfo(torch.float32).eps / 2
    assert scale.item() == pytest.approx(true, rel=bound)
    assert (1.0 / weight.float().abs().mean()).item() == pytest.approx(true, rel=bound)


def test_no_rows_and_no_columns(implementation):
    for shape in ((0, 8), (3, 0), (0, 0)):
        if shape[1]:
            assert round_inputs(torch.zeros(shape)).shape == shape
        assert round_weights(torch.zeros(shape), (shape[0],)).shape == shape


def test_rounding_follows_its_formula_in_bands(monkeypatch):
    monkeypatch.setattr(ternary, "BAND", 48)  # two rows
    x, w = torch.randn(5, 24) * 3, torch.randn(20, 24)
    scale = 127 / x.abs().amax(-1, keepdim=True)
    assert torch.equal(round_inputs(x), (x * scale).round().clamp(-128, 127) / scale)
    means = torch.cat([part.abs().mean().expand(len(part)) for part in w.split([12, 8])])[:, None]
    steps = round_weights(w, (12, 8)) / means
    assert (steps - steps.round()).abs().max() < 1e-6  # two roundings of the quotient
    assert steps.round().unique().tolist() == [-1, 0, 1]
    assert torch.equal(steps.round(), (w / means).round().clamp(-1, 1))


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.full((2, 4), 1e-7)])
def test_tiny_operands_are_rounded_with_the_least_scales(x):
    assert torch.equal(round_inputs(x), (x * (127 / 1e-5)).round() / (127 / 1e-5))
    assert torch.equal(round_weights(x, (2,)), torch.zeros(2, 4))


def test_not_a_number_stays_one():
    x = torch.tensor([[1.0, torch.nan], [2.0, 1.0]])
    assert round_inputs(x).isnan().tolist() == [[True, True], [False, False]]
