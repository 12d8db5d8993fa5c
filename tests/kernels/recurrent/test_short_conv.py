"""short_conv: documents, states and errors. The contract common to all operations is in test_contract.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import (
    conv_state,
    document_bounds,
    gated_short_conv,
    short_conv,
    short_conv_step,
)
from liger_models.kernels.recurrent.short_conv import short_conv_plain

CHANNELS = 6
DOCUMENTS = [0, 1, 4, 4, 13, 30]  # one token, shorter than the state, empty, and across tiles


def operands(taps, tokens=30, states=5):
    x, weight, bias = torch.randn(tokens, CHANNELS), torch.randn(CHANNELS, taps), torch.randn(CHANNELS)
    state = torch.randn(states, taps - 1, CHANNELS)
    return [tensor.requires_grad_() for tensor in (x, weight, bias, state)]


def one_by_one(x, weight, bias, state, documents):
    """Convolution of each document alone, after its state, by torch in float64."""
    parts = []
    for nth, (first, end) in enumerate(itertools.pairwise(documents)):
        if first < end:
            inputs = torch.cat([state[nth], x[first:end]]).T[None]
            parts.append(F.conv1d(inputs, weight[:, None], bias, groups=CHANNELS)[0].T)
    return F.silu(torch.cat(parts))


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("continues", [False, True])
def test_documents_are_convolved_separately_after_their_states(taps, continues, implementation, assert_near):
    inputs = operands(taps)
    documents = torch.tensor(DOCUMENTS)
    x, weight, bias, state = inputs
    y = short_conv(
        x, weight, bias, activation="silu", cu_seqlens=documents, state=state if continues else None
    )
    upstream = torch.randn_like(y)
    wanted = inputs if continues else inputs[:3]
    grads = torch.autograd.grad(y, wanted, upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    if not continues:
        exact[3] = torch.zeros_like(exact[3])
    truth = one_by_one(*exact, DOCUMENTS)
    true_grads = torch.autograd.grad(truth, exact[: len(wanted)], upstream.double())
    # A sum of up to eight products, and SiLU; gradients sum as many of these, and over 30 tokens.
    assert_near(y, truth, 12 + taps)
    for grad, true in zip(grads, true_grads, strict=True):
        assert_near(grad, true, 24 + taps + 30)


@pytest.mark.parametrize("taps", [3, 7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gates_multiply_before_and_after_the_convolution(taps, with_bias, implementation, assert_near):
    _, weight, bias, _ = operands(taps)
    wide = torch.randn(30, 3 * CHANNELS + 2).requires_grad_()
    inputs = [wide, weight, bias] if with_bias else [wide, weight]
    documents = torch.tensor(DOCUMENTS)

    def gated(wide, weight, bias=None):
        return gated_short_conv(wide[:, 1:-1], weight, bias, bounds=document_bounds(documents, 30))

    y = gated(*inputs)
    grads = torch.autograd.grad(y, inputs, upstream := torch.randn_like(y))
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    before, after, u = exact[0][:, 1:-1].chunk(3, dim=1)
    truth = after * short_conv(before * u, *exact[1:], cu_seqlens=documents)
    # A sum of up to eight products of three numbers; gradients sum as many of these, and over 30 tokens.
    assert_near(y, truth, 12 + taps)
    for grad, true in zip(grads, torch.autograd.grad(truth, exact, upstream.double()), strict=True):
        assert_near(grad, true, 24 + taps + 30)


def test_parts_of_a_document_equal_the_whole(implementation, assert_near):
    taps = 4
    x, weight, bias, _ = operands(taps)
    options = {"activation": "silu"}
    whole = short_conv(x, weight, bias, **options)
    state, parts = None, []
    for first, end in ((0, 9), (9, 10), (10, 12), (12, 29)):  # two parts are shorter than the state
        parts.append(short_conv(x[first:end], weight, bias, state=state, **options))
        state = conv_state(x[first:end], None, taps, state)
    last, state = short_conv_step(x[29:], weight, bias, state, **options)
    assert_near(torch.cat([*parts, last]), whole.double(), 12)
    assert torch.equal(state[0], x[-3:])


def test_gradients_flow_through_a_state_to_its_inputs(implementation, assert_near):
    taps = 4
    x, weight, bias, _ = operands(taps)
    whole = short_conv(x, weight, bias, activation="silu")
    upstream = torch.randn_like(whole)
    first = short_conv(x[:2], weight, bias, activation="silu")
    state = conv_state(x[:2], None, taps)
    rest = short_conv(x[2:], weight, bias, activation="silu", state=state)
    expected = torch.autograd.grad(whole, [x, weight, bias], upstream)
    found = torch.autograd.grad(torch.cat([first, rest]), [x, weight, bias], upstream)
    for ours, true in zip(found, expected, strict=True):
        assert_near(ours, true.double(), 24 + taps + 30)


def test_states_of_packed_documents_are_their_last_inputs():
    x = torch.arange(30.0)[:, None].expand(30, CHANNELS)
    old = -torch.arange(1.0, 16.0).view(5, 3, 1).expand(5, 3, CHANNELS)
    states = conv_state(x, torch.tensor(DOCUMENTS), 4, old)[..., 0]
    # Document 0 has one token and keeps two inputs of its old state; document 2 is empty and keeps all three.
    assert states.tolist() == [[-2, -3, 0], [1, 2, 3], [-7, -8, -9], [10, 11, 12], [27, 28, 29]]
    fresh = conv_state(x, torch.tensor(DOCUMENTS), 4)[..., 0]
    assert fresh.tolist() == [[0, 0, 0], [1, 2, 3], [0, 0, 0], [10, 11, 12], [27, 28, 29]]


def test_bounds_shared_between_calls_give_the_same_bits(implementation):
    x, weight, bias, _ = operands(4)
    documents = torch.tensor(DOCUMENTS)
    by_bounds = short_conv(x, weight, bias, bounds=document_bounds(documents, 30))
    assert torch.equal(by_bounds, short_conv(x, weight, bias, cu_seqlens=documents))


def test_a_slice_of_a_wider_projection_is_read_without_a_copy(implementation):
    x, weight, bias, _ = operands(4)
    wider = torch.randn(30, 3 * CHANNELS)
    wider[:, CHANNELS : 2 * CHANNELS] = x.detach()
    within = wider[:, CHANNELS : 2 * CHANNELS]
    assert torch.equal(short_conv(within, weight, bias), short_conv(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, "expected 'silu' or None"),
        ({"weight": torch.ones(CHANNELS, 1)}, "2 <= K <= 8"),
        ({"weight": torch.ones(CHANNELS, 9)}, "2 <= K <= 8"),
        ({"weight": torch.ones(CHANNELS + 1, 4)}, r"expected \[T, C\] and \[C, K\]"),
        ({"bias": torch.ones(CHANNELS + 1)}, r"bias is \(7,\); expected \(6,\)"),
        ({"state": torch.ones(1, 4, CHANNELS)}, r"state is \(1, 4, 6\); expected \(1, 3, 6\)"),
        ({"bounds": torch.zeros(2, 5, dtype=torch.int32)}, r"bounds is \(2, 5\); expected \(2, 30\)"),
        ({"cu_seqlens": torch.tensor([0, 30]), "bounds": torch.zeros(2, 30)}, "give one of them"),
        ({"bounds": torch.zeros(2, 30), "state": torch.ones(1, 3, CHANNELS)}, "a state needs cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 12])}, "must rise from 0 to the number of tokens, 30"),
    ],
)
def test_incompatible_inputs_are_refused(change, message):
    x, weight, bias, _ = operands(4)
    call = {"weight": weight, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        short_conv(x, **call)


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "taps"), [(8192, 4), (2048, 3), (2048, 7), (100, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_documents_at_real_widths_equal_separate_ones(channels, taps, dtype):
    documents = [0, 1, 700, 701, 4096]
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype, device="cuda").requires_grad_()
        for shape in ((4096, channels), (channels, taps), (channels,))
    )
    y = short_conv(x, weight, bias, activation="silu", cu_seqlens=torch.tensor(documents, device="cuda"))
    upstream = torch.randn_like(y)
    dx, *sums = torch.autograd.grad(y, [x, weight, bias], upstream)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    starts = document_bounds(torch.tensor(documents, device="cuda"), 4096)[0]
    true_grads = torch.autograd.grad(short_conv_plain(*exact, "silu", starts), exact, upstream.double())
    # Rounded once, after sums over up to 4,096 tokens in float32.
    for ours, true in zip((dx, *sums), true_grads, strict=True):
        assert (ours - true).norm() < (torch.finfo(dtype).eps + 1e-5) * true.norm()
    for first, end in itertools.pairwise(documents):
        one = torch.tensor([0, end - first], device="cuda")
        alone = short_conv(x[first:end], weight, bias, activation="silu", cu_seqlens=one)
        assert torch.equal(alone, y[first:end])
        (dx_alone,) = torch.autograd.grad(alone, [x], upstream[first:end])
        assert torch.equal(dx_alone[first:end], dx[first:end])
