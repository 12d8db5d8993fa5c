"""Gated products whose inputs are kept in 8 bits."""

import pytest
import torch

from liger_models.kernels.activations.gated import gated_plain
from liger_models.kernels.float8.copies import carried_rows
from liger_models.kernels.float8.eight_bits import (
    BLOCK,
    decode_plain,
    eight_bits_plain,
    gated_eight_bits,
    gated_from_eight_bits,
)
from liger_models.kernels.float8.quantize import rows_plain

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]


def draw(rows: int, width: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Rows of different sizes, a block of zeros, and an outlier."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(rows, 2 * width, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    x[0, : BLOCK // 2] = 0
    x[-1, 3] = 1000
    return x.to(device, dtype)


def run(x: torch.Tensor, activation: str = "silu"):
    x = x.clone().requires_grad_()
    y, codes, scales = gated_eight_bits(x, activation, float8=True)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y))
    return y.detach(), codes, scales, x.grad, carried_rows(y)


@pytest.mark.parametrize("width", [16, 128, 200])
def test_a_block_is_rounded_to_the_nearest_of_255_steps(width):
    x = draw(3, width)
    codes, scales = eight_bits_plain(x)
    spread = scales.float().repeat_interleave(BLOCK, -1)[..., :width].reshape(3, 2 * width)
    apart = (decode_plain(codes, scales) - x).abs()
    assert (apart <= spread / 2 * (1 + 2**-20)).all()
    largest = torch.nn.functional.pad(x.view(3, 2, width).abs(), (0, -width % BLOCK))
    largest = largest.view(3, 2, -1, BLOCK).amax(-1)
    assert (scales.float() <= largest / 127 * (1 + 2**-7)).all()  # rounded up to 8 bits
    assert codes.abs().max() == 127


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_product_and_gradient_are_those_of_the_rounded_inputs(activation):
    x = draw(5, 200)
    y, codes, scales, gradient, copy = run(x, activation)
    rounded = decode_plain(codes, scales).requires_grad_()
    expected = gated_plain(rounded, None, activation)
    assert torch.equal(y, expected.detach())
    expected.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    torch.testing.assert_close(gradient, rounded.grad, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy.values.float(), rows_plain(y).values.float())
    again = gated_from_eight_bits(codes, scales, activation, torch.float32, float8=True)
    assert torch.equal(again, y)
    assert torch.equal(carried_rows(again).values.float(), copy.values.float())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(3, 16), (2, 200), (2, 4128)])
def test_the_kernels_are_the_plain_twin(activation, size):
    from liger_models.kernels._dispatch import interpret

    x = draw(*size)
    plain = run(x, activation)
    with interpret():
        found = run(x, activation)
    assert torch.equal(found[1], plain[1])
    assert torch.equal(found[2], plain[2])
    for a, b in ((found[0], plain[0]), (found[3], plain[3])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) * 2**-3)
    assert torch.equal(found[4].scales, plain[4].scales)


def test_the_gradient_carries_its_copy():
    seen = []
    x = draw(3, 64).requires_grad_()
    middle = x * 1
    middle.register_hook(lambda gradient: seen.append((gradient, carried_rows(gradient))))
    gated_eight_bits(middle, "silu", float8_gradient=True)[0].sum().backward()
    gradient, copy = seen[0]
    assert torch.equal(copy.values.float(), rows_plain(gradient).values.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value):
    x = draw(2, 128)
    x[0, 5] = value
    y = gated_eight_bits(x, "silu")[0]
    assert y[0, :BLOCK].isnan().all()
    assert y[0, BLOCK:].isfinite().all()
    assert y[1].isfinite().all()


def test_sizes_and_no_rows():
    assert gated_eight_bits(torch.zeros(0, 32), "silu")[0].shape == (0, 16)
    with pytest.raises(ValueError, match="even last dimension"):
        gated_eight_bits(torch.zeros(2, 33), "silu")
    with pytest.raises(ValueError, match="even last dimension"):
        gated_eight_bits(torch.zeros(2, 2, 32), "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(3, 16), (130, 200), (512, 14336)])
def test_compiled_kernels_give_the_plain_twins_codes(activation, size):
    x = draw(*size, dtype=torch.bfloat16, device="cuda")
    y, codes, scales, gradient, copy = run(x, activation)
    plain = eight_bits_plain(x)
    assert torch.equal(codes, plain[0])
    assert torch.equal(scales, plain[1])
    exact = decode_plain(codes, scales).double().requires_grad_()
    expected = gated_plain(exact, None, activation)
    expected.backward(torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y).double())
    for found, of in ((y, expected.detach()), (gradient, exact.grad)):
        error = (found.double() - of).abs()  # rounded to bfloat16; a sigmoid of 1e-6 relative error
        assert (error <= of.abs() * 2**-8 + 1e-5 * of.abs().amax(1, keepdim=True)).all()
    rows = rows_plain(y.float())
    assert torch.equal(copy.scales, rows.scales)
    assert torch.equal(copy.values.view(torch.uint8), rows.values.view(torch.uint8))
