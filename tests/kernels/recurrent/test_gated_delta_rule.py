"""gated_delta_rule: the chunk form against the recurrence in float64, documents, states and errors."""

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

from liger_models.kernels import gated_delta_rule, gated_delta_rule_step
from liger_models.kernels.recurrent import _chunk_table
from liger_models.kernels.recurrent._chunk_table import chunk_table


def operands(tokens, key_heads, heads, key, value, documents=0, decay=1.0, device="cpu", dtype=torch.float32):
    """q, k, v, a, b, A_log, dt_bias, and a state for each document; `decay` scales exp(A_log)."""
    shapes = [(tokens, key_heads, key)] * 2 + [(tokens, heads, value)] + [(tokens, heads)] * 2
    inputs = [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes]
    inputs += [(torch.rand(heads, device=device) * decay).log(), torch.randn(heads, device=device)]
    if documents:
        inputs.append(torch.randn(documents, heads, key, value, device=device))
    return [x.requires_grad_() for x in inputs]


def run(inputs, **options):
    *rest, state = inputs if len(inputs) == 8 else [*inputs, None]
    return gated_delta_rule(*rest, state=state, **options)


with_gradients = functools.partial(delta_problem.with_gradients, run)


@pytest.mark.parametrize(
    ("shape", "documents", "options", "decay"),
    [
        ((70, 1, 1, 16, 16), None, {}, 30.0),
        ((150, 2, 4, 16, 24), DOCUMENTS, {}, 0.1),
        ((67, 1, 3, 20, 16), [0, 67], {"beta_scale": 2.0}, 0.1),
        ((20, 1, 2, 16, 16), [0, 9, 20], {}, 30.0),
    ],
    ids=[
        "one document, fast",
        "packed, two value heads a key head",
        "widths that are not a power of two",
        "packed, fast",
    ],
)
def test_chunks_follow_the_recurrence(shape, documents, options, decay, interpreted):
    count = 0 if documents is None else len(documents) - 1
    inputs = operands(*shape, documents=count, decay=decay)
    if documents is not None:
        options = options | {"cu_seqlens": torch.tensor(documents)}
    found, upstream = with_gradients(inputs, **options)
    truth, _ = with_gradients(in_float64(inputs), upstream, **options)
    for ours, true in zip(found, truth, strict=True):
        # A dozen sums in a row over up to 64 tokens and 20 channels in float32. Gates that hardly matter
        # (exp of -100) have gradients whose terms nearly cancel, so these are compared absolutely.
        assert relative(ours, true) < 2e-5 or (ours.double() - true).abs().max() < 1e-5


def test_a_document_does_not_affect_the_one_before_it(interpreted):
    # For heads of this size, TMA also loads rows past the end of a document.
    inputs = operands(70, 1, 2, 128, 128, dtype=torch.float16)
    check_document_unaffected_by_the_next(run, inputs, 66)


def test_parts_of_a_document_and_single_steps_equal_the_whole(implementation):
    check_parts_and_steps_equal_the_whole(gated_delta_rule, gated_delta_rule_step, operands(70, 1, 2, 16, 24))


def test_packed_documents_equal_separate_ones_in_every_gradient():
    """In the plain form, which the kernels follow."""
    check_packed_equal_separate(gated_delta_rule, run, operands(150, 1, 2, 16, 16, documents=5))


def test_keys_that_repeat_stay_exact(interpreted):
    # (1 + A)^-1 computed from powers of A would lose every digit here: A is one below the diagonal.
    inputs = operands(64, 1, 1, 16, 16)
    with torch.no_grad():
        inputs[1].copy_(inputs[1][:1].expand_as(inputs[1]))
        inputs[3].fill_(-20.0)  # no decay
        inputs[4].fill_(20.0)  # beta of one
    found, upstream = with_gradients(inputs)
    truth, _ = with_gradients(in_float64(inputs), upstream)
    for ours, true in zip(found[:5], truth[:5], strict=True):
        assert relative(ours, true) < 2e-5


def test_documents_of_several_segments_follow_the_recurrence(interpreted, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 64)
    monkeypatch.setattr(_chunk_table, "_PROGRAMS", 2)
    inputs = operands(702, 1, 1, 16, 16, documents=5)
    documents = torch.tensor([0, 1, 1, 132, 139, 702])  # with one segment, none, three, one, and five of 128
    found, upstream = with_gradients(inputs, cu_seqlens=documents)
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 2e-5  # as above


def test_no_tokens_give_no_outputs_and_the_given_states(implementation):
    inputs = operands(0, 1, 2, 16, 16, documents=2)
    o, final = run(inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert o.shape == (0, 2, 16)
    assert torch.equal(final, inputs[7])


def test_a_second_run_and_a_second_backward_pass_give_the_same_bits(interpreted):
    inputs = operands(70, 1, 2, 16, 16)
    first, upstream = with_gradients(inputs)
    second, _ = with_gradients(inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_but_the_operands_is_kept(interpreted):
    check_only_operands_kept(run, operands(70, 1, 2, 16, 16, documents=1))


def test_the_plain_form_passes_gradcheck_in_float64():
    inputs = in_float64(operands(5, 1, 2, 3, 4, documents=2))
    torch.autograd.gradcheck(lambda *x: run(x, cu_seqlens=torch.tensor([0, 2, 5])), inputs)


def test_the_table_names_every_chunk_and_segment_once(interpreted, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 128)
    lengths = [1, 0, 64, 65, 20, 300, *[3] * 70, 129, 1200, 128, 1023]  # more documents than one pass handles
    bounds = [0, *itertools.accumulate(lengths)]
    chunks, segments, first_segments = [], [], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        first_segments.append(len(segments))
        size = 256 if end - first == 1200 else 128  # of four segments and more
        for start in range(first, max(end, first + 1), size):
            segment = [document, start, min(start + size, end), len(chunks) + (start - first) // 64]
            segments.append(segment)
        chunks += [[start, end] for start in range(first, end, 64)]
    table = chunk_table(torch.tensor(bounds), bounds[-1], torch.device("cpu"), heads=32)
    assert table.ranges.T.tolist()[: len(chunks)] == chunks
    assert not table.ranges[:, len(chunks) :].any()
    assert table.segments[:4].T.tolist()[: len(segments)] == segments
    longest_first = sorted(range(len(segments)), key=lambda n: segments[n][1] - segments[n][2])
    assert table.segments[4].tolist() == [*longest_first, *range(len(segments), table.segments.shape[1])]
    assert (table.segments[0, len(segments) :] == -1).all()
    assert table.first_segments.tolist() == first_segments
    assert len(segments) - len(lengths) <= table.boundaries


def test_more_documents_than_a_grid_has_programs_are_refused():
    """They are counted before a kernel runs."""
    for documents, tokens in ((65_536, 65_536), (65_530, 65_530 + 8 * 4096)):
        bounds = torch.arange(documents + 1).clamp_(max=tokens)
        with pytest.raises(ValueError, match=f"found {documents} documents.*at most 65535"):
            chunk_table(bounds, tokens, torch.device("cpu"), heads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.ones(4, 1, 15)}, r"k \(4, 1, 15\)"),
        ({2: torch.ones(5, 2, 16)}, r"v \(5, 2, 16\)"),
        ({2: torch.ones(4, 2, 16).double()}, "expected one dtype"),
        ({3: torch.ones(4, 1)}, r"a is \(4, 1\), b \(4, 2\)"),
        ({5: torch.ones(3)}, r"A_log is \(3,\)"),
        ({7: torch.ones(2, 2, 16, 16)}, r"state is \(2, 2, 16, 16\); expected \(1, 2, 16, 16\)"),
        ({0: torch.ones(4, 3, 16), 1: torch.ones(4, 3, 16)}, "2 value heads for 3 key heads"),
    ],
)
def test_incompatible_inputs_are_refused(change, message):
    inputs = operands(4, 1, 2, 16, 16, documents=1)
    for place, tensor in change.items():
        inputs[place] = tensor
    with pytest.raises(ValueError, match=message):
        run(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.1, 30.0], ids=["slow", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("key", "value"), [(128, 128), (96, 192), (64, 64), (16, 32)])
def test_every_gradient_is_correct_on_a_gpu(key, value, dtype, decay):
    documents = torch.tensor([0, 1, 70, 200])
    inputs = operands(200, 2, 4, key, value, documents=3, decay=decay, device="cuda", dtype=dtype)
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    exact = in_float64(inputs)
    truth, _ = with_gradients(exact, upstream, cu_seqlens=documents)
    # Operands of products are rounded to q's dtype: about a dozen roundings in a row from q to a gradient.
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 12 * torch.finfo(dtype).eps / 2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_float32_is_exact_on_a_gpu(width, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 64)
    documents = torch.tensor([0, 1, 70, 200])
    inputs = operands(200, 2, 4, width, width, documents=3, device="cuda")
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 2e-5  # as on a CPU


@pytest.mark.gpu
def test_documents_of_several_segments_follow_the_recurrence_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 256)
    inputs = operands(1500, 1, 2, 128, 128, documents=4, device="cuda", dtype=torch.bfloat16)
    documents = torch.tensor([0, 1100, 1400, 1401, 1500])
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 12 * torch.finfo(torch.bfloat16).eps / 2  # as above


@pytest.mark.gpu
def test_a_thousand_documents_on_a_gpu_equal_separate_ones():
    bounds = [0, *itertools.accumulate(LENGTHS)]
    inputs = operands(bounds[-1], 4, 8, 128, 128, device="cuda", dtype=torch.bfloat16)
    documents = torch.tensor(bounds, device="cuda")
    o, final = run(inputs, cu_seqlens=documents)
    grads = torch.autograd.grad(o, inputs[:3], upstream := torch.randn_like(o))
    for nth, (first, end) in list(enumerate(itertools.pairwise(bounds)))[::7]:
        alone, state = gated_delta_rule(*(x[first:end] for x in inputs[:5]), *inputs[5:])
        assert torch.equal(alone, o[first:end])
        assert torch.equal(state[0], final[nth])
        if first < end:
            single = torch.autograd.grad(alone, inputs[:3], upstream[first:end])
            for one, packed in zip(single, grads, strict=True):
                assert torch.equal(one[first:end], packed[first:end])
