"""channel_delta_rule: the chunk form against the recurrence in float64, gates, documents and states."""

import functools
import itertools

import delta_problem
import pytest
import torch
from delta_problem import (
    DOCUMENTS,
    LENGTHS,
    check_document_unaffected_by_the_next,
    check_only_operands_kept,
    check_packed_equal_separate,
    check_parts_and_steps_equal_the_whole,
    in_float64,
    relative,
)

from liger_models.kernels import channel_delta_rule, channel_delta_rule_step, gated_delta_rule
from liger_models.kernels.recurrent import _chunk_table


def operands(tokens, heads, key, value, documents=0, decay=1.0, device="cpu", dtype=torch.float32):
    """q, k, v, f, b, A_log, dt_bias, and a state for each document; `decay` scales exp(A_log)."""
    shapes = [(tokens, heads, key)] * 2 + [(tokens, heads, value), (tokens, heads, key), (tokens, heads)]
    inputs = [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes]
    inputs += [(torch.rand(heads, device=device) * decay).log(), torch.randn(heads, key, device=device)]
    if documents:
        inputs.append(torch.randn(documents, heads, key, value, device=device))
    return [x.requires_grad_() for x in inputs]


def run(inputs, **options):
    *rest, state = inputs if len(inputs) == 8 else [*inputs, None]
    return channel_delta_rule(*rest, state=state, **options)


with_gradients = functools.partial(delta_problem.with_gradients, run)


def assert_follows(found, truth, bound=2e-5):
    # A dozen sums in a row over up to 64 tokens and 20 channels in float32. Gates that hardly matter
    # (exp of -100) have gradients whose terms nearly cancel, so these are compared absolutely.
    for ours, true in zip(found, truth, strict=True):
        assert torch.isfinite(ours).all()
        assert relative(ours, true) < bound or (ours.double() - true).abs().max() < bound / 2


@pytest.mark.parametrize(
    ("shape", "documents", "options", "decay"),
    [
        ((70, 1, 16, 16), None, {}, 30.0),
        ((150, 2, 16, 24), DOCUMENTS, {"lower_bound": -5.0}, 0.1),
        ((67, 1, 20, 16), [0, 67], {"beta_scale": 2.0}, 0.1),
        ((20, 1, 16, 16), [0, 9, 20], {"lower_bound": -5.0}, 30.0),
    ],
    ids=[
        "one document, fast",
        "packed, bounded gates",
        "widths that are not a power of two",
        "packed, bounded gates, fast",
    ],
)
def test_chunks_follow_the_recurrence(shape, documents, options, decay, interpreted):
    count = 0 if documents is None else len(documents) - 1
    inputs = operands(*shape, documents=count, decay=decay)
    if documents is not None:
        options = options | {"cu_seqlens": torch.tensor(documents)}
    found, upstream = with_gradients(inputs, **options)
    truth, _ = with_gradients(in_float64(inputs), upstream, **options)
    assert_follows(found, truth)


def test_gates_of_hundreds_next_to_gates_of_zero_do_not_overflow(interpreted):
    # G falls to -4,000 within the chunk, so a difference of two values of G is off by up to 2e-4, and so is
    # the decay between neighbouring tokens.
    inputs = operands(70, 1, 16, 16)
    with torch.no_grad():
        inputs[3].mul_(30.0)
        inputs[3][::3].abs_().mul_(10.0)
        inputs[5].zero_()
    found, upstream = with_gradients(inputs)
    truth, _ = with_gradients(in_float64(inputs), upstream)
    assert_follows(found, truth, bound=1e-3)


def test_equal_channels_give_the_rule_with_a_decay_for_each_head(implementation):
    inputs = operands(70, 2, 16, 16)
    q, k, v, f, b, A_log, dt_bias = inputs
    with torch.no_grad():
        f.copy_(f[..., :1].expand_as(f))
        dt_bias.copy_(dt_bias[:, :1].expand_as(dt_bias))
    found = channel_delta_rule(q, k, v, f, b, A_log, dt_bias)
    expected = gated_delta_rule(q, k, v, f[..., 0], b, A_log, dt_bias[:, 0])
    for ours, true in zip(found, expected, strict=True):
        assert relative(ours, true) < 1e-5


def test_a_document_does_not_affect_the_one_before_it(interpreted):
    # For heads of this size, TMA also loads rows past the end of a document.
    inputs = operands(70, 1, 128, 128, dtype=torch.float16)
    check_document_unaffected_by_the_next(run, inputs, 66)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_parts_of_a_document_and_single_steps_equal_the_whole(lower_bound, implementation):
    check_parts_and_steps_equal_the_whole(
        channel_delta_rule, channel_delta_rule_step, operands(70, 1, 16, 24), lower_bound=lower_bound
    )


def test_packed_documents_equal_separate_ones_in_every_gradient():
    """In the plain form, which the kernels follow."""
    check_packed_equal_separate(channel_delta_rule, run, operands(150, 1, 16, 16, documents=5))


def test_documents_of_several_segments_follow_the_recurrence(interpreted, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 128)
    inputs = operands(270, 1, 16, 16, documents=4)
    documents = torch.tensor([0, 1, 1, 261, 270])  # with one segment, none, three and one
    found, upstream = with_gradients(inputs, cu_seqlens=documents)
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 2e-5  # as above


def test_no_tokens_give_no_outputs_and_the_given_states(implementation):
    inputs = operands(0, 2, 16, 16, documents=2)
    o, final = run(inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert o.shape == (0, 2, 16)
    assert torch.equal(final, inputs[7])
    torch.autograd.grad(final.sum(), inputs, allow_unused=True)


def test_a_second_run_and_a_second_backward_pass_give_the_same_bits(interpreted):
    inputs = operands(70, 2, 16, 16)
    first, upstream = with_gradients(inputs)
    second, _ = with_gradients(inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_plain_form_passes_gradcheck_in_float64(lower_bound):
    inputs = in_float64(operands(5, 1, 3, 4, documents=2))
    documents = torch.tensor([0, 2, 5])
    torch.autograd.gradcheck(lambda *x: run(x, cu_seqlens=documents, lower_bound=lower_bound), inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.ones(4, 2, 16)}, "2 value heads and 1 key heads"),
        ({3: torch.ones(4, 1, 15)}, r"f is \(4, 1, 15\), b \(4, 1\)"),
        ({6: torch.ones(16)}, r"A_log is \(1,\), dt_bias \(16,\)"),
        ({7: torch.ones(2, 1, 16, 16)}, r"state is \(2, 1, 16, 16\); expected \(1, 1, 16, 16\)"),
        ({0: torch.ones(4, 1, 144), 1: torch.ones(4, 1, 144)}, "key heads are 144 wide"),
    ],
)
def test_mismatched_operands_are_refused(change, message):
    inputs = operands(4, 1, 16, 16, documents=0 if 2 in change else 1)
    for place, tensor in change.items():
        inputs[place] = tensor
    with pytest.raises(ValueError, match=message):
        run(inputs)


def test_a_lower_bound_that_is_not_negative_is_refused():
    with pytest.raises(ValueError, match=r"lower_bound is 5\.0"):
        run(operands(4, 1, 16, 16), lower_bound=5.0)


def test_nothing_but_the_operands_is_kept(interpreted):
    check_only_operands_kept(run, operands(70, 1, 16, 16, documents=1))


@pytest.mark.gpu
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("decay", [0.1, 3.0, 30.0], ids=["slow", "medium", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("key", "value"), [(128, 128), (96, 192), (64, 64), (16, 32)])
def test_every_gradient_is_correct_on_a_gpu(key, value, dtype, decay, lower_bound):
    documents = torch.tensor([0, 1, 70, 200])
    inputs = operands(200, 2, key, value, documents=3, decay=decay, device="cuda", dtype=dtype)
    options = {"lower_bound": lower_bound}
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda(), **options)
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents, **options)
    # Operands of products are rounded to q's dtype: about a dozen roundings in a row from q to a gradient.
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 12 * torch.finfo(dtype).eps / 2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_float32_is_exact_on_a_gpu(width, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 64)
    documents = torch.tensor([0, 1, 70, 200])
    inputs = operands(200, 2, width, width, documents=3, device="cuda")
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 2e-5  # as on a CPU


@pytest.mark.gpu
def test_documents_of_several_segments_follow_the_recurrence_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 256)
    inputs = operands(1500, 2, 128, 128, documents=4, device="cuda", dtype=torch.bfloat16)
    documents = torch.tensor([0, 1100, 1400, 1401, 1500])
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 12 * torch.finfo(torch.bfloat16).eps / 2  # as above


@pytest.mark.gpu
def test_a_thousand_documents_on_a_gpu_equal_separate_ones():
    bounds = [0, *itertools.accumulate(LENGTHS)]
    inputs = operands(bounds[-1], 4, 128, 128, device="cuda", dtype=torch.bfloat16)
    o, final = run(inputs, cu_seqlens=torch.tensor(bounds, device="cuda"))
    grads = torch.autograd.grad(o, inputs[:4], upstream := torch.randn_like(o))
    for nth, (first, end) in list(enumerate(itertools.pairwise(bounds)))[::7]:
        alone, state = channel_delta_rule(*(x[first:end] for x in inputs[:5]), *inputs[5:])
        assert torch.equal(alone, o[first:end])
        assert torch.equal(state[0], final[nth])
        if first < end:
            single = torch.autograd.grad(alone, inputs[:4], upstream[first:end])
            for one, packed in zip(single, grads, strict=True):
                assert torch.equal(one[first:end], packed[first:end])
