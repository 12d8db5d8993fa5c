"""RMSNorm, and residual add with RMSNorm. The contract common to all operations is in test_contract.py."""

import pytest
import torch

from liger_models.kernels import add_rms_norm, rms_norm
from liger_models.kernels.norms import _norm_kernels
from liger_models.kernels.norms.rms_norm import rms_norm_plain

CASTS = ["llama", "gemma", "float32"]


def gradients(function, inputs, upstream):
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return torch.autograd.grad(outputs, inputs, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_each_order_of_casts_gives_the_bits_of_transformers(cast, dtype):
    if cast == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm
    elif cast == "gemma":
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm as Norm
    else:
        from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm as Norm
    norm = Norm(48, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 48).to(dtype)
    expected = norm(x)
    assert expected.dtype == dtype
    assert torch.equal(rms_norm(x, norm.weight, 1e-3, 1.0 if cast == "gemma" else 0.0, cast), expected)


@pytest.mark.parametrize("cast", CASTS)
def test_a_float32_weight_on_bfloat16_input_gives_the_dtype_of_the_reference(cast, implementation):
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    expected = torch.float32 if cast == "llama" else torch.bfloat16
    assert rms_norm(x, weight, cast=cast).dtype == expected


@pytest.mark.parametrize("cast", CASTS)
def test_kernel_and_twin_agree_where_a_program_handles_many_rows(cast, interpreted, assert_near):
    # 150 rows of 300 make nineteen tiles for eight programs; the last tile is partly empty.
    x, weight = torch.randn(150, 300, requires_grad=True), torch.randn(300, requires_grad=True)
    upstream = torch.randn(150, 300)
    ours = gradients(lambda x, w: rms_norm(x, w, 1e-5, 0.5, cast), (x, weight), upstream)
    truth_inputs = [t.detach().double().requires_grad_() for t in (x, weight)]
    true = gradients(lambda x, w: rms_norm_plain(x, w, 1e-5, 0.5, cast), truth_inputs, upstream.double())
    for a, b in zip(ours, true, strict=True):
        assert_near(
            a, b, 24 + 6
        )  # gradient of the weight: three tiles per program, eight rows of a tile summed in a tree


def test_rows_too_wide_for_registers_are_read_in_blocks(interpreted, assert_near):
    x, residual = torch.randn(2, 2, 16_500, requires_grad=True)
    weight = torch.randn(16_500, requires_grad=True)
    upstream = torch.randn(2, 2, 16_500).unbind()
    inputs = (x, residual, weight)
    truth_inputs = [t.detach().double().requires_grad_() for t in inputs]
    for a, b in zip(add_rms_norm(*inputs), add_rms_norm(*truth_inputs), strict=True):
        assert_near(a, b, 12)
    true = gradients(add_rms_norm, truth_inputs, [u.double() for u in upstream])
    for a, b in zip(gradients(add_rms_norm, inputs, upstream), true, strict=True):
        assert_near(a, b, 24)


def test_a_row_of_one_element_has_the_gradient_that_eps_leaves(implementation):
    x = torch.tensor([[0.5], [-2.0]], requires_grad=True)
    weight = torch.tensor([3.0], requires_grad=True)
    (dx,) = gradients(lambda x: rms_norm(x, weight, eps=0.1), (x,), torch.ones(2, 1))
    # d/dx of w x / sqrt(x^2 + eps) is w eps / (x^2 + eps)^1.5, the difference of two terms of about w / |x|.
    expected = 3.0 * 0.1 / (x.detach() ** 2 + 0.1) ** 1.5
    assert (dx - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * 3.0 / 0.5


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("width", [6, 40, 16_500])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # bfloat16: on a GPU, below
def test_add_rms_norm_gives_the_bits_of_add_then_norm(cast, width, dtype, implementation):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
    y, total = add_rms_norm(x, residual, weight, 1e-5, 0.5, cast)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, 1e-5, 0.5, cast))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("width", [100, 2048, 4096, 8192, 16384, 16_500])
def test_add_rms_norm_gives_the_bits_of_add_then_norm_on_a_gpu(cast, width, dtype):
    x, residual = torch.randn(2, 500, width, device="cuda").to(dtype)
    weight = torch.randn(width, device="cuda").to(dtype)
    y, total = add_rms_norm(x, residual, weight, 1e-5, 0.5, cast)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, 1e-5, 0.5, cast))


@pytest.mark.parametrize("used", ["y", "total"])
def test_add_rms_norm_needs_only_the_gradients_that_arrive(used, interpreted, assert_near):
    inputs = [torch.randn(3, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)]
    inputs.append(torch.randn(6, requires_grad=True))
    y, total = add_rms_norm(*inputs)
    truth_inputs = [t.detach().double().requires_grad_() for t in inputs]
    true_y, true_total = add_rms_norm(*truth_inputs)
    upstream = torch.randn(3, 6)
    output, true_output = (y, true_y) if used == "y" else (total, true_total)
    grads = torch.autograd.grad(output, inputs, upstream, allow_unused=True)
    true = torch.autograd.grad(true_output, truth_inputs, upstream.double(), allow_unused=True)
    for a, b in zip(grads, true, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_near(a, b, 24)


def test_add_rms_norm_keeps_only_the_sum_the_weight_and_one_number_a_row(interpreted):
    x, residual = torch.randn(2, 3, 6).unbind()
    x.requires_grad_()
    weight = torch.randn(6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, total = add_rms_norm(x, residual, weight)
    numbers_a_row = [t for t in kept if t.shape == (3,) and t.dtype == torch.float32]
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (total, weight, *numbers_a_row)}
    assert len(numbers_a_row) == 1


def test_the_two_gradients_of_a_residual_add_do_not_share_memory(interpreted):
    x, residual = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    sum(output.sum() for output in add_rms_norm(x, residual, torch.randn(6))).backward()
    before = residual.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, before)


def test_a_frozen_weight_gets_no_gradient_and_changes_none(interpreted):
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(6)
    upstream = torch.randn(3, 6)
    (frozen,) = gradients(lambda x: rms_norm(x, weight), (x,), upstream)
    trained, _ = gradients(rms_norm, (x, weight.requires_grad_()), upstream)
    assert torch.equal(frozen, trained)


@pytest.mark.parametrize(
    ("dtype", "room", "stages"),
    [(torch.bfloat16, 99, 3), (torch.float32, 99, 1), (torch.float32, 163, 1), (torch.float32, 227, 3)],
)
def test_pipelined_loads_fit_the_shared_memory_of_a_gpu(dtype, room, stages, interpreted, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **options: launched.append(options["STAGES"])

    monkeypatch.setattr(_norm_kernels, "_backward_kernel", Kernel())
    monkeypatch.setattr(_norm_kernels, "shared_memory", lambda x: room * 1024)
    x, residual = (torch.randn(1, 8192, dtype=dtype, requires_grad=True) for _ in range(2))
    y, total = add_rms_norm(x, residual, torch.ones(8192, dtype=dtype))
    torch.autograd.grad((y, total), x, (y, total))
    assert launched == [stages]


def test_leading_dimensions_are_rows(implementation):
    x, weight = torch.randn(2, 3, 5, 6), torch.randn(6)
    assert torch.equal(rms_norm(x, weight).view(30, 6), rms_norm(x.view(30, 6), weight))
    assert torch.equal(rms_norm(x[0, 0, 0], weight), rms_norm(x, weight)[0, 0, 0])


def test_mismatched_operands_are_refused():
    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"weight is \(5,\); expected \(6,\)"):
        rms_norm(x, torch.randn(5))
    with pytest.raises(ValueError, match="cast is 'olmo'; expected 'llama', 'gemma' or 'float32'"):
        rms_norm(x, None, cast="olmo")
    with pytest.raises(ValueError, match="no weight to add it to"):
        rms_norm(x, None, offset=1.0)
    with pytest.raises(ValueError, match="expected one shape"):
        add_rms_norm(x, x[:1], None)
