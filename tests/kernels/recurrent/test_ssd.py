"""The scan of Mamba 2: chunks equal the recurrence in float64, with all gradients and states."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_models.kernels.recurrent.ssd import ssd, ssd_step

LENGTHS = [70, 1, 0, 64, 3]
LIMIT = (0.3, 1.5)  # both of which some steps reach


def operands(tokens: int, documents: int, dtype=torch.float64, groups: int = 2):
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    heads = [random(4) for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)
    state = random(documents, 4, 3, 5, dtype=wide)
    return [
        random(tokens, 4, 3),
        random(tokens, 4),
        random(tokens, groups, 5),
        random(tokens, groups, 5),
        *heads,
        state,
    ]


def by_token(x, dt, B, C, A_log, D, dt_bias, state, bounds, limit):
    outputs, finals = [], []
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        s = state[document : document + 1]
        for t in range(first, end):
            one = (tensor[t : t + 1] for tensor in (x, dt, B, C))
            y, s = ssd_step(*one, A_log, D, dt_bias, s, dt_limit=limit)
            outputs.append(y)
        finals.append(s)
    return torch.cat(outputs), torch.cat(finals)


# float64: sums of 70 terms or more in another order; float32: the same, 2^29 times as coarse.
@pytest.mark.parametrize(
    ("dtype", "bound", "groups", "limit"),
    [
        (torch.float64, 1e-12, 2, LIMIT),
        (torch.float32, 1e-5, 2, LIMIT),
        (torch.float64, 1e-12, 1, (0.0, None)),
        (torch.float64, 1e-12, 4, (0.4, None)),
    ],
)
def test_chunks_equal_the_recurrence(dtype, bound, groups, limit):
    bounds = [0, *itertools.accumulate(LENGTHS)]
    given = operands(bounds[-1], len(LENGTHS), dtype, groups)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    *others, state = given
    found = ssd(*others, dt_limit=limit, cu_seqlens=torch.tensor(bounds), state=state)
    expected = by_token(*wide, bounds, limit)
    weights = [torch.randn_like(result) for result in expected]
    for results, inputs in ((found, given), (expected, wide)):
        sum((y * w.to(y.dtype)).sum() for y, w in zip(results, weights, strict=True)).backward(inputs=inputs)
    for ours, theirs in zip(
        [*found, *(t.grad for t in given)], [*expected, *(t.grad for t in wide)], strict=True
    ):
        assert (ours - theirs).norm() <= bound * theirs.norm()


def test_a_document_without_a_state_begins_with_zeros_and_others_change_nothing():
    *given, state = operands(71, 2)
    alone, final = ssd(*(tensor[1:] if len(tensor) == 71 else tensor for tensor in given))
    packed, finals = ssd(*given, cu_seqlens=torch.tensor([0, 1, 71]))
    torch.testing.assert_close(packed[1:], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(finals[1:], final, rtol=1e-12, atol=1e-12)
    zeros = ssd(*given, cu_seqlens=torch.tensor([0, 1, 71]), state=torch.zeros_like(state))
    assert torch.equal(zeros[0], packed)


def test_only_operands_are_kept_for_the_backward_pass():
    given = operands(130, 1)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ssd(*given[:-1], state=given[-1])
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in given}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: (9, 3, 4)}, "3 heads for 2 groups"),
        ({1: (9, 3)}, r"dt \(9, 3\)"),
        ({2: (8, 2, 5)}, r"B is \(8, 2, 5\)"),
        ({7: (1, 4, 5, 3)}, r"expected \(1, 4, 3, 5\)"),
        ({5: (3,)}, r"expected \(4,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    given = operands(9, 1)
    for place, shape in changes.items():
        given[place] = torch.zeros(shape, dtype=torch.float64)
    if changes.keys() == {0}:
        given[1] = torch.zeros(9, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        ssd(*given[:-1], state=given[-1])
