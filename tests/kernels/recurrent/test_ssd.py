"""The scan of Mamba 2: chunks equal the recurrence in float64, with all gradients and states."""

from __future__ import annotations

import functools
import itertools

import delta_problem
import pytest
import torch
from delta_problem import DOCUMENTS, in_float64, relative

from liger_models.kernels._gpu import INTERPRETED, Gpu
from liger_models.kernels.recurrent import _chunk_table
from liger_models.kernels.recurrent.state_spaces import _ssd_chunks, _ssd_states
from liger_models.kernels.recurrent.state_spaces.ssd import ssd, ssd_step

LENGTHS = [70, 1, 0, 64, 3]
LIMIT = (0.3, 1.5)  # both of which some steps reach
A100 = Gpu("sm_80", (8, 0), 163 * 1024, 108)
RTX_5090 = Gpu("sm_120", (12, 0), 99 * 1024, 170)


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


# -- the kernels, against the plain form in float64


def tensors(tokens, heads, head_dim, groups, state, documents=0, device="cpu", dtype=torch.float32):
    """x, dt, B, C, A_log, D, dt_bias, and a state for each document."""
    shapes = [(tokens, heads, head_dim), (tokens, heads), *[(tokens, groups, state)] * 2]
    inputs = [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes]
    inputs += [torch.randn(heads, device=device) for _ in range(3)]
    if documents:
        inputs.append(torch.randn(documents, heads, head_dim, state, device=device))
    return [x.requires_grad_() for x in inputs]


def run(inputs, **options):
    *rest, state = inputs if len(inputs) == 8 else [*inputs, None]
    return ssd(*rest, state=state, **options)


with_gradients = functools.partial(delta_problem.with_gradients, run)


def assert_exact(inputs, bound, **options):
    """Results and all gradients are within a relative `bound` of the truth."""
    found, upstream = with_gradients(inputs, **options)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"].cpu()
    truth, _ = with_gradients(in_float64(inputs), upstream, **options)
    for ours, true in zip(found, truth, strict=True):
        assert relative(ours, true) < bound


@pytest.mark.parametrize(
    ("shape", "documents", "options"),
    [
        ((70, 2, 16, 1, 16), None, {}),
        ((150, 4, 16, 2, 20), DOCUMENTS, {"dt_limit": LIMIT}),
        ((67, 2, 72, 2, 70), [0, 67], {}),
    ],
    ids=["one document", "packed, two heads a group", "states of several tiles"],
)
def test_kernels_follow_the_recurrence(shape, documents, options, interpreted):
    inputs = tensors(*shape, documents=0 if documents is None else len(documents) - 1)
    if documents is not None:
        options = options | {"cu_seqlens": torch.tensor(documents)}
    assert_exact(inputs, 2e-5, **options)  # a dozen sums in a row over up to 64 tokens in float32


def test_wide_states_are_read_in_blocks_where_shared_or_tensor_memory_is_small(interpreted, monkeypatch):
    for module in (_ssd_chunks, _ssd_states):
        monkeypatch.setattr(module, "shared_memory", lambda x: 64 * 1024)
        monkeypatch.setattr(module, "gpu_of", lambda x: INTERPRETED._replace(capability=(10, 0)))
    assert_exact(tensors(20, 1, 16, 1, 144), 2e-5)  # as above


@pytest.mark.parametrize("gpu", [RTX_5090, A100], ids=lambda gpu: gpu.arch)
def test_gradients_of_heads_are_exact_with_the_tiles_of_smaller_gpus(gpu, interpreted, monkeypatch):
    for module in (_ssd_chunks, _ssd_states):
        monkeypatch.setattr(module, "shared_memory", lambda x: gpu.shared_memory)
        monkeypatch.setattr(module, "gpu_of", lambda x: gpu)
    # Wider than a tile, with states of two blocks where tiles are smallest. The interpreter reads bfloat16 as
    # integers. The bound is that on a GPU below.
    inputs = tensors(67, 1, 72, 1, 70, dtype=torch.float16)
    assert_exact(inputs, 12 * torch.finfo(torch.float16).eps / 2)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_are_divided_into_slices_and_parts(groups, interpreted, monkeypatch):
    monkeypatch.setattr(_ssd_chunks, "_slices", lambda *_: 2)
    monkeypatch.setattr(_ssd_chunks, "_parts", lambda *_: 2)
    inputs = tensors(70, 4, 16, groups, 16, documents=2)
    assert_exact(inputs, 2e-5, cu_seqlens=torch.tensor([0, 3, 70]))  # as above


def test_documents_of_several_segments_follow_the_recurrence(interpreted, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 64)
    inputs = tensors(143, 2, 16, 1, 16, documents=4)
    documents = torch.tensor([0, 1, 1, 140, 143])  # with one segment, none, three and one
    assert_exact(inputs, 2e-5, cu_seqlens=documents)  # as above


def test_a_document_does_not_affect_the_one_before_it(interpreted):
    inputs = tensors(70, 2, 64, 1, 64, dtype=torch.float16)
    rows, by_head = inputs[:4], inputs[4:]
    first = [x.detach()[:66].requires_grad_() for x in rows]
    upstream = [torch.randn(66, 2, 64).half(), torch.zeros(1, 2, 64, 64)]
    truth, _ = with_gradients(in_float64([*first, *by_head]), upstream)
    with torch.no_grad():
        rows[0][66:] = float("nan")
    y, _ = ssd(*inputs, cu_seqlens=torch.tensor([0, 66, 66, 70, 70]))
    rest = torch.full_like(upstream[0][:4], float("nan"))
    found = [y, *torch.autograd.grad(y, rows, torch.cat([upstream[0], rest]))]
    for ours, true in zip(found, [truth[0], *truth[2:6]], strict=True):
        # a dozen roundings in a row
        assert relative(ours[:66], true) < 12 * torch.finfo(torch.float16).eps / 2


def test_no_tokens_give_no_outputs_and_the_given_states(implementation):
    inputs = tensors(0, 2, 16, 1, 16, documents=2)
    y, final = run(inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert y.shape == (0, 2, 16)
    assert torch.equal(final, inputs[7])
    (dstate,) = torch.autograd.grad(final, inputs[7:], upstream := torch.randn_like(final))
    assert torch.equal(dstate, upstream)


def test_parts_of_a_document_equal_the_whole(interpreted):
    *rows, A_log, D, dt_bias = tensors(150, 2, 16, 1, 16)
    whole, final = ssd(*rows, A_log, D, dt_bias)
    state, parts = None, []
    for first, end in ((0, 64), (64, 65), (65, 150)):
        y, state = ssd(*(x[first:end] for x in rows), A_log, D, dt_bias, state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_operands_are_columns_of_one_tensor(interpreted):
    inputs = tensors(70, 2, 16, 1, 16)
    y, _ = run(inputs)
    found = torch.autograd.grad(y, [inputs[0], *inputs[2:4]], torch.randn_like(y))
    columns = [gradient.flatten(1) for gradient in found]
    sizes = [gradient.shape[1] for gradient in columns]
    whole = columns[0].as_strided((70, sum(sizes)), (sum(sizes), 1))
    for part, expected in zip(whole.split(sizes, 1), columns, strict=True):
        assert part.data_ptr() == expected.data_ptr()
        assert part.stride() == expected.stride()


def test_a_second_run_gives_the_same_bits(interpreted):
    inputs = tensors(70, 2, 16, 1, 16)
    first, upstream = with_gradients(inputs)
    second, _ = with_gradients(inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Granite 4 H Small, Nemotron-H 8B, Falcon-H1 34B, and heads that fill no tile.
WIDTHS = [(128, 64, 1, 128), (128, 64, 8, 128), (32, 128, 2, 256), (6, 40, 2, 72)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_every_gradient_is_correct_on_a_gpu(width, dtype):
    documents = torch.tensor([0, 1, 70, 70, 200], device="cuda")
    inputs = tensors(200, *width, documents=4, device="cuda", dtype=dtype)
    # Operands of products are rounded to x's dtype: about a dozen roundings in a row from x to a gradient.
    assert_exact(inputs, 12 * torch.finfo(dtype).eps / 2, cu_seqlens=documents, dt_limit=(0.01, 4.0))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_float32_is_exact_on_a_gpu(width, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 64)
    documents = torch.tensor([0, 1, 70, 200], device="cuda")
    inputs = tensors(200, 4, width, 2, width, documents=3, device="cuda")
    assert_exact(inputs, 2e-5, cu_seqlens=documents)  # as on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 8])
def test_documents_of_several_segments_and_slices_are_correct_on_a_gpu(groups, monkeypatch):
    monkeypatch.setattr(_chunk_table, "SEGMENT", 256)
    monkeypatch.setattr(_ssd_chunks, "LEAST_SLICE", 2**19)
    documents = torch.tensor([0, 1100, 1400, 1401, 1500], device="cuda")
    inputs = tensors(1500, 16, 64, groups, 128, documents=4, device="cuda", dtype=torch.bfloat16)
    assert_exact(inputs, 12 * torch.finfo(torch.bfloat16).eps / 2, cu_seqlens=documents)  # as above


@pytest.mark.gpu
def test_a_thousand_documents_on_a_gpu_equal_separate_ones():
    bounds = [0, *itertools.accumulate(delta_problem.LENGTHS)]
    inputs = tensors(bounds[-1], 8, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
    y, final = run(inputs, cu_seqlens=torch.tensor(bounds, device="cuda"))
    grads = torch.autograd.grad(y, inputs[:4], upstream := torch.randn_like(y))
    alone, packed = [], []
    for nth, (first, end) in list(enumerate(itertools.pairwise(bounds)))[::7]:
        single, state = ssd(*(x[first:end] for x in inputs[:4]), *inputs[4:])
        assert torch.equal(single, y[first:end])
        assert torch.equal(state[0], final[nth])
        if first < end:
            found = torch.autograd.grad(single, inputs[:4], upstream[first:end])
            found = [gradient[first:end] for gradient in found]
            expected = [gradient[first:end] for gradient in grads]
            assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True))  # x, dt
            alone.append(torch.stack(found[2:]))
            packed.append(torch.stack(expected[2:]))
    # The heads may be divided into other slices and parts: sums of B and C in another order, then rounded.
    assert relative(torch.cat(alone, 1), torch.cat(packed, 1)) < torch.finfo(torch.bfloat16).eps
