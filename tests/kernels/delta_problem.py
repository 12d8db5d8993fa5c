"""Documents, gradients, errors and checks, shared by the tests of the two delta rules."""

import itertools

import torch

# Documents of one token, none, a whole chunk, a chunk and one token, and less than a chunk.
DOCUMENTS = [0, 1, 1, 65, 130, 150]


# A thousand lengths in random order.
LENGTHS = [(0, 1, 1, 7, 64, 65, 130, 3, 20, 33)[(nth + nth // 10) % 10] for nth in range(1000)]


def with_gradients(run, inputs, upstream=None, **options):
    """Outputs and the gradients of all inputs, and the upstream gradients."""
    outputs = run(inputs, **options)
    upstream = upstream or [torch.randn_like(output) for output in outputs]
    upstream = [given.to(output) for given, output in zip(upstream, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)], upstream


def in_float64(inputs):
    return [x.detach().double().cpu().requires_grad_() for x in inputs]


def relative(actual, truth):
    truth = truth.double()
    return ((actual.double().to(truth.device) - truth).norm() / truth.norm()).item()


def check_document_unaffected_by_the_next(run, inputs, end):
    """Compare a first document of `end` tokens with float64, with v and the gradient of o NaN after it.

    Args:
        run: the rule; takes the inputs and `cu_seqlens`.
        inputs: five float16 tensors with one row per token, v third, and the gates' parameters.
        end: the end of the first document.
    """
    tokens, gates = inputs[:5], inputs[5:]
    exact = in_float64([*(x[:end] for x in tokens), *gates])
    upstream = torch.randn_like(tokens[2])
    o, _ = run(exact)
    truth = [o, *torch.autograd.grad(o, exact[:5], upstream[:end].double())]
    with torch.no_grad():
        tokens[2][end:] = float("nan")
        upstream[end:] = float("nan")
    o, _ = run(inputs, cu_seqlens=torch.tensor([0, end, len(upstream)]))
    for ours, true in zip([o, *torch.autograd.grad(o, tokens, upstream)], truth, strict=True):
        # a dozen roundings in a row
        assert relative(ours[:end], true) < 12 * torch.finfo(torch.float16).eps / 2


def check_parts_and_steps_equal_the_whole(rule, step, inputs, **options):
    """Compare 70 tokens of one document with three parts of it, and two single steps from their state.

    Args:
        rule, step: the operation, and the operation for one token.
        inputs: five tensors with one row per token, and the gates' parameters.
    """
    tokens, gates = inputs[:5], inputs[5:]
    whole, final = rule(*inputs, **options)
    state, parts = None, []
    for first, end in ((0, 64), (64, 65), (65, 68)):
        o, state = rule(*(x[first:end] for x in tokens), *gates, state=state, **options)
        parts.append(o)
    for t in (68, 69):
        o, state = step(*(x[t : t + 1] for x in tokens), *gates, state, **options)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def check_packed_equal_separate(rule, run, inputs):
    """Compare `DOCUMENTS`, packed, with each alone, in outputs, states and every gradient.

    Args:
        rule: the operation.
        run: the same on all inputs at once, with `cu_seqlens`.
        inputs: five tensors with one row per token, the gates' parameters, and a state for each document.
    """
    tokens, gates, state = inputs[:5], inputs[5:7], inputs[7]
    packed, upstream = with_gradients(run, inputs, cu_seqlens=torch.tensor(DOCUMENTS))
    outputs, finals = [], []
    for nth, (first, end) in enumerate(itertools.pairwise(DOCUMENTS)):
        o, final = rule(*(x[first:end] for x in tokens), *gates, state=state[nth : nth + 1])
        outputs.append(o)
        finals.append(final)
    alone = [torch.cat(outputs), torch.cat(finals)]
    alone += torch.autograd.grad(alone, inputs, upstream)
    for ours, true in zip(packed, alone, strict=True):
        assert relative(ours, true) < 1e-5


def check_only_operands_kept(run, inputs):
    """Check that autograd keeps the inputs for the backward pass, and no states of chunks."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}
