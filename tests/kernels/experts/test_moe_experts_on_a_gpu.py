"""The layer of experts on a GPU: at real sizes, compiled, and without synchronising."""

import pytest
import torch
from moe_problem import operands, run, weighing_inputs, with_biases, without_gates

from liger_models.kernels import moe_experts
from liger_models.kernels._gpu import imagined
from liger_models.kernels.experts.moe_experts import moe_experts_plain

FORMS = {
    "plain": lambda function: function,
    "biases": with_biases,
    "weighted inputs": weighing_inputs,
    "without gates": without_gates,
}


@pytest.mark.gpu
def test_no_kernel_is_compiled_at_its_first_launch(monkeypatch):
    """With sizes of its own, for which nothing was compiled before."""
    from triton.runtime.jit import JITFunction

    late, compile = [], JITFunction._do_compile

    def noted(kernel, *args, **options):
        if imagined.get() is None:
            late.append(kernel.fn.__name__)
        return compile(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    inputs = operands(300, 208, 56, 6, 3, None, torch.bfloat16, "cuda")
    run(moe_experts, inputs, torch.randn(300, 208, device="cuda").bfloat16())
    assert not late


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("favourite", [None, 3])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "num_experts", "top_k"),
    [
        (4096, 2048, 768, 128, 8),
        (3001, 1024, 3584, 8, 2),
        (4001, 1024, 512, 4, 2),  # enough rows that the weights' gradient is computed with torch's product
        (1, 2048, 768, 128, 8),
        (700, 101, 77, 8, 2),
    ],
)
def test_at_real_sizes_it_is_as_accurate_as_eager(tokens, hidden, inner, num_experts, top_k, favourite, form):
    sizes = tokens, hidden, inner, num_experts, top_k
    inputs = operands(*sizes, favourite, torch.bfloat16, "cuda", form == "biases")
    upstream = torch.randn(tokens, hidden, device="cuda").bfloat16()
    fast, plain = (FORMS[form](f) for f in (moe_experts, moe_experts_plain))
    ours, again = run(fast, inputs, upstream), run(fast, inputs, upstream)
    eager = run(plain, inputs, upstream)
    truth = run(plain, [t.float() if t.is_floating_point() else t for t in inputs], upstream)
    for mine, same, theirs, exact in zip(ours, again, eager, truth, strict=True):
        assert torch.equal(mine, same)
        assert (mine - exact).norm() <= 1.1 * (theirs - exact).norm() + 1e-6 * exact.norm()


# Tokens and experts: few rows per expert, and enough that torch's product computes the weights' gradient.
by_rows = pytest.mark.parametrize(("tokens", "num_experts"), [(300, 16), (4000, 4)])


@pytest.mark.gpu
@by_rows
@pytest.mark.parametrize("form", FORMS)
def test_compiled_without_breaks_gives_the_same_bits_on_a_gpu(form, tokens, num_experts):
    inputs = operands(tokens, 256, 128, num_experts, 2, None, torch.bfloat16, "cuda", form == "biases")
    upstream = torch.randn(tokens, 256, device="cuda").bfloat16()
    function = FORMS[form](moe_experts)
    compiled = torch.compile(function, fullgraph=True)
    for a, b in zip(run(compiled, inputs, upstream), run(function, inputs, upstream), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@by_rows
def test_on_a_gpu_nan_stays_with_its_experts_and_those_without_tokens_have_zero_gradients(
    tokens, num_experts
):
    x, weights, _, *matrices = operands(tokens, 64, 32, num_experts, 1, None, torch.bfloat16, "cuda")
    experts = 1 + torch.arange(tokens, device="cuda").view(-1, 1) % (num_experts - 1)  # none go to the first
    broken = x.detach().where(experts != 2, torch.nan)

    def gradients(x):
        return torch.autograd.grad(moe_experts(x, weights, experts, *matrices).sum(), matrices)

    for a, b in zip(gradients(x), gradients(broken), strict=True):
        assert not b[0].any()
        assert b[2].isnan().all()
        others = [e for e in range(num_experts) if e != 2]
        assert torch.equal(a[others], b[others])


@pytest.mark.gpu
@by_rows
@pytest.mark.parametrize("form", FORMS)
def test_neither_pass_waits_for_the_gpu(form, tokens, num_experts):
    inputs = operands(tokens, 256, 128, num_experts, 2, None, torch.bfloat16, "cuda", form == "biases")
    function = FORMS[form](moe_experts)
    upstream = torch.randn(tokens, 256, device="cuda").bfloat16()
    run(function, inputs, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(function, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
