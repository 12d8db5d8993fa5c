"""Float8 copies that tensors carry, and the operations that make them."""

import gc

import pytest
import torch

from liger_models.kernels import add_rms_norm, rms_norm
from liger_models.kernels._gpu import Gpu
from liger_models.kernels.float8 import copies
from liger_models.kernels.float8.copies import carried_rows, carry_rows, forget_rows
from liger_models.kernels.float8.eight_bits import gated_eight_bits, gated_from_eight_bits
from liger_models.kernels.float8.quantize import (
    ALIGNMENT,
    quantize,
    quantize_columns,
    quantize_plain,
    rows_plain,
    turned,
)

E4M3 = torch.float8_e4m3fn


def draw(*size: int, device="cpu") -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_a_copy_ends_with_a_change_and_with_its_tensor():
    x = draw(3, 32)
    carry_rows(x, quantize(x)[0])
    assert carried_rows(x) is not None
    assert carried_rows(x.clone()) is None
    x.add_(1)
    assert carried_rows(x) is None
    carry_rows(x, quantize(x)[0])
    forget_rows(x)
    assert carried_rows(x) is None
    carry_rows(x, quantize(x)[0])
    before = len(copies._COPIES)
    del x
    gc.collect()
    assert len(copies._COPIES) == before - 1


def check_columns(x: torch.Tensor) -> None:
    rows, direct = quantize(x)[0], quantize(x, by_rows=False, by_columns=True)[1]
    columns = quantize_columns(rows.values, rows.scales)
    assert columns.values.shape == direct.values.shape
    # Powers of two leave the numbers of the rows as they are, unless they become subnormal.
    apart = (columns.dequantized()[:, : len(x)] - rows.dequantized().T).abs()
    assert (apart <= columns.scales * 2.0**-10).all()
    plain = quantize_plain(rows.dequantized(), False, True, E4M3, False)[1]
    assert torch.equal(columns.scales, plain.scales)
    if x.is_cuda:  # the interpreter rounds to float8 in its own way
        assert torch.equal(bits(columns.values), bits(plain.values))
    over = turned(rows)
    assert torch.equal(bits(over.values)[:, : len(x)], bits(rows.values).T)
    assert not bits(over.values)[:, len(x) :].any()
    assert over.values.shape[1] % ALIGNMENT == 0
    assert (over.scales == 1).all()


@pytest.mark.parametrize("size", [(5, 32), (17, 64)])
def test_columns_from_rows(size):
    check_columns(draw(*size))


@pytest.mark.parametrize("size", [(5, 32), (130, 272)])
def test_columns_from_rows_by_the_kernels(interpreted, size):
    check_columns(draw(*size))


def test_rows_alone_have_the_scales_of_rows_and_columns(interpreted):
    x = draw(7, 48)
    alone, both = quantize(x)[0], quantize(x, by_columns=True)[0]
    assert torch.equal(alone.scales, both.scales)
    assert torch.equal(bits(alone.values), bits(both.values))


def test_without_e4m3_in_triton_the_plain_twin_quantises(interpreted, monkeypatch):
    """On GPUs before Ada, where products in float8 can be emulated."""
    a100 = Gpu("sm_80", (8, 0), 163 * 1024, 108)
    monkeypatch.setattr("liger_models.kernels.float8.quantize.gpu_of", lambda x: a100)
    x = draw(5, 64)
    rows, columns = quantize(x, by_columns=True)
    for found, plain in zip((rows, columns), quantize_plain(x, True, True, E4M3, False), strict=True):
        assert torch.equal(bits(found.values), bits(plain.values))
    assert carried_rows(rms_norm(x, None, float8=True)) is None
    y, codes, scales = gated_eight_bits(x, "silu", float8=True, float8_gradient=True)
    assert carried_rows(y) is None
    assert torch.equal(gated_from_eight_bits(codes, scales, "silu", x.dtype, float8=True), y)


def check_norm(x: torch.Tensor, exactly: bool) -> None:
    residual, weight = x.flip(0), x[0].clone().requires_grad_()
    x = x.clone().requires_grad_()
    seen = []
    middle = x * 1
    middle.register_hook(lambda gradient: seen.append((gradient, carried_rows(gradient))))
    y, total = add_rms_norm(middle, residual, weight, float8=True, float8_gradient=True)
    alone = rms_norm(total.detach(), weight, float8=True)
    (y.sum() + total.square().sum()).backward()
    # Kernels with other tiles sum a row's squares in another order, which can turn both roundings: of the
    # normalised value, and of its product with the weight.
    torch.testing.assert_close(alone, y, rtol=2 * torch.finfo(y.dtype).eps if x.is_cuda else 0.0, atol=0.0)
    for of, copy in ((y, carried_rows(y)), (alone, carried_rows(alone)), *seen):
        if copy is None:
            assert not x.is_cuda
            continue
        plain = rows_plain(of.detach().float())
        assert torch.equal(copy.scales, plain.scales)
        assert not exactly or torch.equal(bits(copy.values), bits(plain.values))


@pytest.mark.parametrize("size", [(3, 48), (9, 32)])
def test_norms_quantise_in_the_same_pass(size):
    check_norm(draw(*size).float(), exactly=True)


@pytest.mark.parametrize("size", [(3, 48), (9, 32)])
def test_kernels_of_norms_quantise_in_the_same_pass(interpreted, size):
    check_norm(draw(*size).float(), exactly=False)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(3, 48), (16384, 4096), (64, 16384)])
def test_compiled_norms_quantise_in_the_same_pass(size):
    check_norm(draw(*size, device="cuda"), exactly=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(130, 272), (4096, 1024), (300, 28672)])
def test_compiled_kernels_make_columns_from_rows(size):
    x = draw(*size, device="cuda")
    check_columns(x)
    rows, plain = quantize(x)[0], rows_plain(x.float())
    assert torch.equal(rows.scales, plain.scales)
    assert torch.equal(bits(rows.values), bits(plain.values))
