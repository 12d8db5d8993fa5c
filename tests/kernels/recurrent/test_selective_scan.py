"""selective_scan: pieces against the recurrence in float64, documents, states, steps and errors."""

import functools
import itertools

import delta_problem
import pytest
import torch
from delta_problem import LENGTHS, in_float64, relative

from liger_models.kernels import selective_scan, selective_scan_step
from liger_models.kernels.recurrent.state_spaces import _selective_pieces
from liger_models.kernels.recurrent.state_spaces import selective_scan as file


def operands(tokens, channels, width, documents=0, device="cpu", dtype=torch.float32, decay=1.0):
    """x, dt, A_log, B, C, D, dt_bias, and a state for each document; `decay` scales exp(A_log)."""
    inputs = [torch.randn(tokens, channels, device=device, dtype=dtype) for _ in range(2)]
    inputs += [(torch.rand(channels, width, device=device) * decay).log()]
    inputs += [torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2)]
    inputs += [torch.randn(channels, device=device), torch.randn(channels, device=device) - 1]
    if documents:
        inputs.append(torch.randn(documents, channels, width, device=device))
    return [x.requires_grad_() for x in inputs]


def run(inputs, **options):
    *rest, state = inputs if len(inputs) == 8 else [*inputs, None]
    return selective_scan(*rest, state=state, **options)


with_gradients = functools.partial(delta_problem.with_gradients, run)


def by_token(inputs, bounds):
    """The recurrence, one token after the other."""
    x, dt, A_log, B, C, D, dt_bias, state = inputs
    outputs, finals = [], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        h = state[document : document + 1]
        for t in range(first, end):
            one = slice(t, t + 1)
            y, h = selective_scan_step(x[one], dt[one], A_log, B[one], C[one], D, dt_bias, h)
            outputs.append(y)
        finals.append(h)
    return torch.cat(outputs), torch.cat(finals)


# Documents of one token, none, a whole piece, several, and less than one; several blocks of channels.
@pytest.mark.parametrize(
    ("shape", "bounds", "decay"),
    [((40, 66, 2), [0, 1, 1, 33, 40], 1.0), ((40, 3, 1), [0, 40], 30.0), ((70, 2, 9), [0, 66, 70], 0.01)],
    ids=["packed", "fast", "slow"],
)
def test_all_forms_equal_the_recurrence_in_float64(shape, bounds, decay, implementation):
    inputs = operands(*shape, documents=len(bounds) - 1, decay=decay)
    found, upstream = with_gradients(inputs, cu_seqlens=torch.tensor(bounds))
    wide = in_float64(inputs)
    truth = by_token(wide, bounds)
    truth += torch.autograd.grad(truth, wide, [given.double() for given in upstream])
    for ours, true in zip(found, truth, strict=True):
        # float32: sums of up to 70 tokens and 66 channels
        assert relative(ours, true) < 1e-5
    again, _ = with_gradients(wide, upstream, cu_seqlens=torch.tensor(bounds))
    for ours, true in zip(again, truth, strict=True):
        assert relative(ours, true) < 1e-12


def test_slabs_of_channels_change_nothing(implementation, monkeypatch):
    inputs = operands(40, 3, 2, documents=2)
    options = {"cu_seqlens": torch.tensor([0, 35, 40])}
    whole, upstream = with_gradients(inputs, **options)
    monkeypatch.setattr(_selective_pieces, "SLAB", 2)
    monkeypatch.setattr(file, "_slabs", lambda x, states: (slice(i, i + 2) for i in range(0, 3, 2)))
    in_slabs, _ = with_gradients(inputs, upstream, **options)
    for ours, true in zip(in_slabs, whole, strict=True):
        assert relative(ours, true) < 1e-6  # sums over channels in another order


def test_parts_of_a_document_and_single_steps_equal_the_whole(implementation):
    inputs = operands(75, 6, 4)
    whole, final = run(inputs)
    state, parts = None, []
    for first, end in ((0, 33), (33, 34), (34, 73)):
        x, dt, A_log, B, C, *rest = (t[first:end] if len(t) == 75 else t for t in inputs)
        y, state = selective_scan(x, dt, A_log, B, C, *rest, state=state)
        parts.append(y)
    for t in (73, 74):
        x, dt, A_log, B, C, *rest = (v[t : t + 1] if len(v) == 75 else v for v in inputs)
        y, state = selective_scan_step(x, dt, A_log, B, C, *rest, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def test_documents_packed_or_alone_have_the_same_bits(interpreted):
    inputs, bounds = operands(50, 3, 2, documents=3), [0, 33, 34, 50]
    (packed, finals, *grads), upstream = with_gradients(inputs, cu_seqlens=torch.tensor(bounds))
    for nth, (first, end) in enumerate(itertools.pairwise(bounds)):
        own = [t[first:end] if len(t) == 50 else t for t in inputs[:7]] + [inputs[7][nth : nth + 1]]
        given = upstream[0][first:end], upstream[1][nth : nth + 1]
        (y, final, *alone), _ = with_gradients([t.detach().requires_grad_() for t in own], given)
        assert torch.equal(y, packed[first:end])
        assert torch.equal(final, finals[nth : nth + 1])
        for place in (0, 1, 3, 4):
            assert torch.equal(alone[place], grads[place][first:end])


def test_no_tokens_give_no_outputs_and_the_given_states(implementation):
    inputs = operands(0, 2, 3, documents=2)
    found, upstream = with_gradients(inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert found[0].shape == (0, 2)
    assert torch.equal(found[1], inputs[7])
    assert torch.equal(found[-1], upstream[1])


def test_the_plain_form_passes_gradcheck_in_float64():
    inputs, documents = in_float64(operands(5, 2, 3, documents=3)), torch.tensor([0, 2, 2, 5])
    torch.autograd.gradcheck(lambda *x: run(x, cu_seqlens=documents), inputs)


def test_only_operands_are_kept_for_the_backward_pass():
    inputs, kept = operands(70, 2, 3, documents=1), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.ones(4, 5)}, r"x is \(4, 6\), dt \(4, 5\)"),
        ({2: torch.ones(5, 3)}, r"A_log is \(5, 3\); expected \(6, N\)"),
        ({2: torch.ones(6, 257)}, "N <= 256"),
        ({4: torch.ones(4, 2)}, r"C \(4, 2\); expected \(4, 3\)"),
        ({6: torch.ones(5)}, r"D and dt_bias are \(6,\), \(5,\)"),
        ({7: torch.ones(1, 3, 6)}, r"state is \(1, 3, 6\); expected \(1, 6, 3\)"),
    ],
)
def test_mismatched_operands_are_refused(change, message):
    inputs = operands(4, 6, 3, documents=1)
    for place, tensor in change.items():
        inputs[place] = tensor
    with pytest.raises(ValueError, match=message):
        run(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0], ids=["slow", "medium", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "width"), [(2100, 16), (70, 64), (33, 5), (40, 200)])
def test_every_gradient_is_correct_on_a_gpu(channels, width, dtype, decay):
    documents = torch.tensor([0, 1, 1, 70, 200])
    inputs = operands(200, channels, width, documents=4, device="cuda", dtype=dtype, decay=decay)
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    # Computed in float32 and rounded once to the operand's dtype; float32 as on a CPU.
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < max(1e-5, torch.finfo(ours.dtype).eps)


@pytest.mark.gpu
def test_a_thousand_documents_on_a_gpu_equal_separate_ones():
    bounds = [0, *itertools.accumulate(LENGTHS)]
    inputs = operands(bounds[-1], 300, 16, device="cuda", dtype=torch.bfloat16)
    y, final = run(inputs, cu_seqlens=torch.tensor(bounds, device="cuda"))
    by_token = [inputs[place] for place in (0, 1, 3, 4)]
    grads = torch.autograd.grad(y, by_token, upstream := torch.randn_like(y))
    for nth, (first, end) in list(enumerate(itertools.pairwise(bounds)))[::7]:
        own = [t[first:end] if len(t) == bounds[-1] else t for t in inputs]
        alone, state = run(own)
        assert torch.equal(alone, y[first:end])
        assert torch.equal(state[0], final[nth])
        if first < end:
            single = torch.autograd.grad(alone, by_token, upstream[first:end])
            for one, packed in zip(single, grads, strict=True):
                assert torch.equal(one[first:end], packed[first:end])


@pytest.mark.gpu
def test_memory_of_the_backward_pass_is_bounded():
    inputs = operands(8192, 8192, 16, device="cuda", dtype=torch.bfloat16)
    y, _ = run(inputs)
    upstream = torch.randn_like(y)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward(upstream)
    results = 2 * y.numel() * 2
    planned = 8192 * _selective_pieces.SLAB * 16 * _selective_pieces.BYTES_IN_BACKWARD
    assert torch.cuda.max_memory_allocated() - before <= results + 1.05 * planned + 64 * 2**20
