"""rg_lru: pieces against the recurrence in float64, documents, states, steps, the bound of the root's
derivative, and errors.
"""

import functools
import itertools

import delta_problem
import pytest
import torch
import torch.nn.functional as F
from delta_problem import LENGTHS, in_float64, relative

from liger_models.kernels import rg_lru, rg_lru_step
from liger_models.kernels.recurrent.rg_lru import LEAST_ROOT


def operands(tokens, heads, width, documents=0, device="cpu", dtype=torch.float32, decay=0.0):
    """x, gates, bias, decay, and a state for each document; `decay` is the mean of that parameter."""
    inputs = [torch.randn(tokens, heads, width, device=device, dtype=dtype)]
    inputs += [torch.randn(tokens, heads, 2, width, device=device, dtype=dtype)]
    inputs += [torch.randn(heads, 2, width, device=device)]
    inputs += [torch.randn(heads * width, device=device) + decay]
    if documents:
        inputs.append(continued(torch.randn(documents, heads * width, device=device)))
    return [x.requires_grad_() for x in inputs]


def continued(h):
    """The state of documents that have begun."""
    return torch.cat([h, torch.ones_like(h[:, :1])], 1)


def run(inputs, **options):
    *rest, state = inputs if len(inputs) == 5 else [*inputs, None]
    return rg_lru(*rest, state=state, **options)


with_gradients = functools.partial(delta_problem.with_gradients, run)


def by_token(inputs, bounds):
    """The recurrence, one token after the other, by its formulas."""
    x, gates, bias, decay, states = inputs
    i, r = (gates + bias).sigmoid().flatten(3).transpose(1, 2).flatten(2).unbind(1)
    a = torch.exp(-8 * r * F.softplus(decay))
    root, x = (1 - a.square()).sqrt(), x.flatten(1)
    outputs, finals = [], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        h, begun = states[document, :-1], states[document, -1:]
        for t in range(first, end):
            opens = t == first and not begun.any()
            h = i[t] * x[t] if opens else a[t] * h + root[t] * i[t] * x[t]
            outputs.append(h)
        finals.append(torch.cat([h, torch.ones_like(begun) if first < end else begun]))
    return torch.stack(outputs).view(inputs[0].shape), torch.stack(finals)


# Documents of one token, none, a whole piece, several, and less than one; several blocks of channels.
@pytest.mark.parametrize(
    ("shape", "decay", "begun"),
    [((43, 1, 66), 0.0, [1, 1, 1, 1]), ((43, 2, 2), -2.0, [1, 0, 0, 1]), ((43, 1, 3), -9.0, [0, 0, 0, 0])],
    ids=["continued", "some begin", "all begin"],
)
def test_all_forms_equal_the_recurrence_in_float64(shape, decay, begun, implementation):
    bounds = [0, 1, 1, 33, 43]
    inputs = operands(*shape, documents=4, decay=decay)
    with torch.no_grad():
        inputs[4][:, -1] = torch.tensor(begun)
    options = {"cu_seqlens": torch.tensor(bounds)}
    found, upstream = with_gradients(inputs, **options)
    wide = in_float64(inputs)
    truth = by_token(wide, bounds)
    truth += torch.autograd.grad(truth, wide, [given.double() for given in upstream])
    truth[-1][:, -1] = 0  # whether documents have begun has no gradient
    for ours, true in zip(found, truth, strict=True):
        # float32: sums of up to 43 tokens; decays that differ from one by their last bits
        assert relative(ours, true) < 1e-5
    again, _ = with_gradients(wide, upstream, **options)
    for ours, true in zip(again, truth, strict=True):
        assert relative(ours, true) < 1e-10  # of the truth, whose 1 - a^2 loses digits


def test_documents_without_states_begin(implementation):
    inputs, options = operands(35, 1, 3, documents=2), {"cu_seqlens": torch.tensor([0, 33, 35])}
    with torch.no_grad():
        inputs[4][:, -1] = 0
    expected, upstream = with_gradients(inputs, **options)
    found, _ = with_gradients(inputs[:4], upstream, **options)
    for ours, true in zip(found, expected[:-1], strict=True):
        assert torch.equal(ours, true)
    assert not expected[-1].any()


def test_a_root_near_zero_has_a_bounded_derivative(implementation):
    """A channel that forgets nothing: a is 1 - 1e-9, and 1 - a^2 below the reference's bound."""
    inputs = operands(30, 1, 4, documents=1)
    with torch.no_grad():
        inputs[3].fill_(-20.0)
    found, upstream = with_gradients(inputs)
    x, gates, bias, decay, state = wide = in_float64(inputs)
    i, r = (gates + bias).sigmoid().unbind(2)
    square = -torch.expm1(-16 * r * F.softplus(decay))
    assert square.max() < LEAST_ROOT**2
    bounded = (square.detach() ** 0.5) + (square - square.detach()) / (2 * LEAST_ROOT)
    written, h, outputs = bounded * i * x, state[:, :-1], []
    for t in range(30):
        h = torch.exp(-8 * r[t] * F.softplus(decay)) * h + written[t]
        outputs.append(h)
    truth = [torch.cat(outputs).view(x.shape), torch.cat([h, torch.ones_like(h[:, :1])], 1)]
    truth += torch.autograd.grad(truth, wide, [given.double() for given in upstream])
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < 1e-5


def test_parts_of_a_document_and_single_steps_equal_the_whole(implementation):
    inputs = operands(75, 2, 3)
    x, gates, *rest = inputs
    whole, final = run(inputs)
    h, state = rg_lru_step(x[:1], gates[:1], *rest, torch.zeros(1, 7))
    parts = [h]
    for first, end in ((1, 33), (33, 34), (34, 73)):
        h, state = rg_lru(x[first:end], gates[first:end], *rest, state=state)
        parts.append(h)
    for t in (73, 74):
        h, state = rg_lru_step(x[t : t + 1], gates[t : t + 1], *rest, state)
        parts.append(h)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def test_documents_packed_or_alone_have_the_same_bits(interpreted):
    inputs, bounds = operands(50, 1, 3, documents=3), [0, 33, 34, 50]
    (packed, finals, *grads), upstream = with_gradients(inputs, cu_seqlens=torch.tensor(bounds))
    for nth, (first, end) in enumerate(itertools.pairwise(bounds)):
        own = [t[first:end] if len(t) == 50 else t for t in inputs[:4]] + [inputs[4][nth : nth + 1]]
        given = upstream[0][first:end], upstream[1][nth : nth + 1]
        (h, final, *alone), _ = with_gradients([t.detach().requires_grad_() for t in own], given)
        assert torch.equal(h, packed[first:end])
        assert torch.equal(final, finals[nth : nth + 1])
        for place in (0, 1):
            assert torch.equal(alone[place], grads[place][first:end])


def test_gates_may_lie_head_by_head(implementation):
    """As a product by head writes them: [heads, T, 2 * width]."""
    x, gates, *rest = operands(5, 2, 3)
    by_head = gates.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    upstream = torch.randn_like(x)
    (h, _), (found, _) = rg_lru(x, gates, *rest), rg_lru(x, by_head, *rest)
    torch.testing.assert_close(found, h, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(h, gates, upstream)[0]
    grads = torch.autograd.grad(found, by_head, upstream)[0]
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


def test_no_tokens_give_no_outputs_and_the_given_states(implementation):
    inputs = operands(0, 2, 3, documents=2)
    found, upstream = with_gradients(inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert found[0].shape == (0, 2, 3)
    assert torch.equal(found[1], inputs[4])
    assert torch.equal(found[-1][:, :-1], upstream[1][:, :-1])


def test_the_plain_form_passes_gradcheck_in_float64():
    *inputs, state = in_float64(operands(5, 1, 2, documents=3))
    h, documents = state.detach()[:, :-1].requires_grad_(), torch.tensor([0, 2, 2, 5])
    torch.autograd.gradcheck(lambda *x: run([*x[:4], continued(x[4])], cu_seqlens=documents), [*inputs, h])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(4, 6)}, r"x is \(4, 6\); expected \[T, heads, width\]"),
        ({1: torch.ones(4, 2, 3, 2)}, r"gates are \(4, 2, 3, 2\); expected \(4, 2, 2, 3\)"),
        ({3: torch.ones(2, 3)}, r"decay \(2, 3\); expected \(2, 2, 3\) and \(6,\)"),
        ({4: torch.ones(1, 6)}, r"state is \(1, 6\); expected \(1, 7\)"),
    ],
)
def test_mismatched_operands_are_refused(change, message):
    inputs = operands(4, 2, 3, documents=1)
    for place, tensor in change.items():
        inputs[place] = tensor
    with pytest.raises(ValueError, match=message):
        run(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [-9.0, 0.0, 4.0], ids=["slow", "medium", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(10, 256), (3, 70), (5, 1)])
def test_every_gradient_is_correct_on_a_gpu(heads, width, dtype, decay):
    documents = torch.tensor([0, 1, 1, 70, 200])
    inputs = operands(200, heads, width, documents=4, device="cuda", dtype=dtype, decay=decay)
    with torch.no_grad():
        inputs[4][2, -1] = 0
    found, upstream = with_gradients(inputs, cu_seqlens=documents.cuda())
    truth, _ = with_gradients(in_float64(inputs), upstream, cu_seqlens=documents)
    # Computed in float32 and rounded once to the operand's dtype; float32 as on a CPU.
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < max(1e-5, torch.finfo(ours.dtype).eps)


@pytest.mark.gpu
def test_a_thousand_documents_on_a_gpu_equal_separate_ones():
    bounds = [0, *itertools.accumulate(LENGTHS)]
    inputs = operands(bounds[-1], 2, 150, device="cuda", dtype=torch.bfloat16)
    h, final = run(inputs, cu_seqlens=torch.tensor(bounds, device="cuda"))
    grads = torch.autograd.grad(h, inputs[:2], upstream := torch.randn_like(h))
    for nth, (first, end) in list(enumerate(itertools.pairwise(bounds)))[::7]:
        own = [t[first:end] if len(t) == bounds[-1] else t for t in inputs]
        alone, state = run(own)
        assert torch.equal(alone, h[first:end])
        assert torch.equal(state[0], final[nth])
        if first < end:
            single = torch.autograd.grad(alone, inputs[:2], upstream[first:end])
            for one, packed in zip(single, grads, strict=True):
                assert torch.equal(one[first:end], packed[first:end])


@pytest.mark.gpu
def test_long_documents_of_real_width_are_correct_on_a_gpu():
    """RecurrentGemma 9B's widths; channels that remember thousands of tokens."""
    inputs = operands(5000, 16, 256, device="cuda", dtype=torch.bfloat16, decay=-6.0)
    found, upstream = with_gradients(inputs)
    with torch.no_grad():
        slow = in_float64([x[:, :1, ..., :32] for x in inputs[:2]] + [inputs[2][:1, :, :32], inputs[3][:32]])
    upstream = [upstream[0][:, :1, :32], upstream[1][:, [*range(32), -1]]]
    truth, _ = with_gradients(slow, upstream)
    ours = [
        found[0][:, :1, :32],
        found[1][:, [*range(32), -1]],
        found[2][:, :1, :32],
        found[3][:, :1, :, :32],
    ]
    ours += [found[4][:1, :, :32], found[5][:32]]
    for one, true in zip(ours, truth, strict=True):
        # float32 states: a decay near one has a relative error of 2**-24, and thousands of them multiply
        assert relative(one, true) < max(2e-4, torch.finfo(one.dtype).eps)
