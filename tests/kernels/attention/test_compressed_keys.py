"""Attention to a window of keys and to compressed ones, and the choice of these, compared with formulas."""

import importlib
import itertools

import pytest
import torch

from liger_models.kernels.attention.choose_compressed import (
    as_blocks,
    choose_compressed,
    choose_compressed_plain,
)
from liger_models.kernels.attention.chosen_blocks import blocks_mask
from liger_models.kernels.attention.compressed_keys import compressed_attention, compressed_keys
from liger_models.kernels.attention.indexer_loss import compressed_indexer_loss
from liger_models.kernels.attention.visible_keys import document_bounds

module = importlib.import_module("liger_models.kernels.attention.compressed_keys")
losses = importlib.import_module("liger_models.kernels.attention.indexer_loss")

# An empty document, ones without a whole key, and longer ones than a block.
PACKED = (0, 3, 3, 4, 10, 47)
RATE, WINDOW, HEADS, DIM, TOP_K = 3, 5, 2, 6, 4


def seen(bounds, rate):
    """Masks of the tokens and of the compressed keys that each query sees, [T, T] and [T, W]."""
    tokens = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    keys = []
    for first, end in itertools.pairwise(bounds):
        for t in range(first, end):
            tokens[t, max(first, t - WINDOW + 1) : t + 1] = True
        for last in range(first + rate - 1, end, rate):
            keys.append([first <= last <= t < end for t in range(bounds[-1])])
    return tokens, torch.tensor(keys).reshape(-1, bounds[-1]).T


def by_hand(q, keys, compressed, sinks, mask, scale):
    every = torch.cat([keys, compressed])
    scores = (torch.einsum("qhd,kd->hqk", q, every) * scale).masked_fill(~mask, -torch.inf)
    sink = sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,kd->qhd", weights, every)


def chosen_of(lists, places):
    """The chosen keys as a mask [T, W]."""
    count = len(places.first)
    return torch.zeros(len(lists), count + 1).scatter_(1, lists.long(), 1.0)[:, :count].bool()


@pytest.fixture(params=[1 << 25, 200], ids=["one block", "blocks of few queries"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", request.param * HEADS)


@pytest.mark.parametrize("rate", [RATE, 0], ids=["compressed", "window"])
@pytest.mark.parametrize("choosing", [False, True])
def test_results_and_gradients_follow_the_formula(rate, choosing, blocks):
    torch.manual_seed(0)
    places = compressed_keys(PACKED, rate, torch.device("cpu"))
    tokens, count = PACKED[-1], len(places.first)
    shapes = (tokens, HEADS, DIM), (tokens, DIM), (count, DIM), (HEADS,)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    of_tokens, of_keys = seen(PACKED, rate) if rate else (seen(PACKED, 1)[0], torch.zeros(tokens, 0).bool())
    chosen = None
    if choosing:
        index = (torch.randn(shape) for shape in ((tokens, 3, 4), (count, 4), (tokens, 3)))
        chosen = choose_compressed(*index, places, TOP_K, scale=0.5)
        of_keys = of_keys & chosen_of(chosen, places)
        assert not rate or (of_keys.sum(1) == TOP_K).any()
    upstream = torch.randn(shapes[0], dtype=torch.float64)
    out = compressed_attention(*operands, places, scale=0.3, window=WINDOW, chosen=chosen)
    expected = by_hand(*operands, torch.cat([of_tokens, of_keys], 1), 0.3)
    torch.testing.assert_close(out, expected)
    grads = (torch.autograd.grad(result, operands, upstream) for result in (out, expected))
    for found, truth in zip(*grads, strict=True):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("choosing", [False, True])
def test_the_indexers_loss_and_its_gradients_follow_the_formula(choosing, blocks, monkeypatch):
    """The target is all heads' attention to compressed keys, in a softmax with the window and the sink."""
    torch.manual_seed(0)
    if choosing:
        monkeypatch.setattr(losses, "_SLICE", 200)  # one head at a time, or a few
    places = compressed_keys(PACKED, RATE, torch.device("cpu"))
    tokens, count = PACKED[-1], len(places.first)
    shapes = (tokens, HEADS, DIM), (tokens, DIM), (count, DIM), (HEADS,)
    q, keys, compressed, sinks = (torch.randn(shape).double() for shape in shapes)
    own = [torch.randn(shape).double() for shape in ((tokens, 3, 4), (count, 4), (tokens, 3))]
    of_tokens, of_keys = seen(PACKED, RATE)
    chosen = choose_compressed(*own, places, TOP_K, scale=0.5) if choosing else None
    if chosen is not None:
        of_keys = of_keys & chosen_of(chosen, places)
    scores = torch.einsum("qhd,kd->hqk", q, torch.cat([keys, compressed])) * 0.3
    scores = scores.masked_fill(~torch.cat([of_tokens, of_keys], 1), -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], -1).softmax(-1)
    target = weights[..., tokens:-1].sum(0)
    index_q, index_k, index_weights = (x.requires_grad_() for x in own)
    products = torch.relu(torch.einsum("qhd,kd->qhk", index_q, index_k) * 0.5)
    student = torch.einsum("qhk,qh->qk", products, index_weights)
    expected = student.new_zeros(())
    for row, visible in enumerate(of_keys):
        if visible.any():
            p, own_scores = target[row, visible] / target[row].sum(), student[row, visible]
            expected = expected + (p * (p.log() - own_scores.log_softmax(-1))).sum()
    options = {"scale": 0.5, "attention_scale": 0.3, "window": WINDOW, "chosen": chosen}
    layer = [x.requires_grad_() for x in (q, keys, compressed, sinks)]
    found = compressed_indexer_loss(*own, *layer, places, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert torch.autograd.grad(found, layer, retain_graph=True, allow_unused=True) == (None,) * 4
    grads = (torch.autograd.grad(3.0 * loss, own) for loss in (found, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_keys_with_the_highest_scores_are_chosen(blocks):
    torch.manual_seed(0)
    places = compressed_keys(PACKED, RATE, torch.device("cpu"))
    q, weights = torch.randn(PACKED[-1], 5, 4), torch.randn(PACKED[-1], 5)
    keys = torch.randn(len(places.first), 4)
    found = chosen_of(choose_compressed(q, keys, weights, places, TOP_K, scale=0.5), places)
    scores = torch.einsum("qhk,qh->qk", torch.relu(torch.einsum("qhd,kd->qhk", q, keys) * 0.5), weights)
    mask = seen(PACKED, RATE)[1]
    for row, (score, visible) in enumerate(zip(scores, mask, strict=True)):
        order = sorted(visible.nonzero()[:, 0].tolist(), key=lambda i, s=score: (-s[i].item(), i))
        assert set((found[row] & visible).nonzero()[:, 0].tolist()) == set(order[:TOP_K])


def test_chosen_keys_stand_for_their_tokens_and_those_after_the_last_whole_key():
    torch.manual_seed(0)
    places = compressed_keys(PACKED, RATE, torch.device("cpu"))
    operands = torch.randn(PACKED[-1], 5, 4), torch.randn(len(places.first), 4), torch.rand(PACKED[-1], 5)
    chosen = choose_compressed(*operands, places, TOP_K, scale=0.5)
    cu = torch.tensor(PACKED)
    found = blocks_mask(as_blocks(chosen, places), document_bounds(cu, PACKED[-1]), PACKED[-1])[0]
    for row in range(PACKED[-1]):
        start = places.start[row].item()
        tokens = set(range(start + (row + 1 - start) // RATE * RATE, row + 1))
        for key in chosen[row].tolist():
            if key < len(places.first):
                tokens |= set(range(places.first[key].item(), places.first[key].item() + RATE))
        assert set(found[row, : row + 1].nonzero()[:, 0].tolist()) == tokens


def test_scores_of_16_bits_are_summed_in_float32():
    torch.manual_seed(0)
    places = compressed_keys(PACKED, RATE, torch.device("cpu"))
    shapes = (PACKED[-1], HEADS, DIM), (PACKED[-1], DIM), (len(places.first), DIM)
    operands, sinks = [torch.randn(shape).bfloat16() for shape in shapes], torch.randn(HEADS)
    out = compressed_attention(*operands, sinks, places, scale=0.3, window=WINDOW)
    wide = [x.float() for x in operands]
    exact = compressed_attention(*wide, sinks, places, scale=0.3, window=WINDOW)
    # A rounding of each weight, whose errors are at most those of the largest values, and one of the result.
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 2 * 2**-8 * exact.abs().max()


def test_operands_that_do_not_fit_are_refused():
    places = compressed_keys((0, 6), RATE, torch.device("cpu"))
    q, keys, sinks = torch.randn(6, HEADS, DIM), torch.randn(6, DIM), torch.randn(HEADS)
    with pytest.raises(ValueError, match=r"expected .* \[2, D\]"):
        compressed_attention(q, keys, None, sinks, places, scale=1.0, window=WINDOW)
    with pytest.raises(ValueError, match="a window of 1 or more"):
        compressed_attention(q, keys, torch.randn(2, DIM), sinks, places, scale=1.0, window=0)


def test_kernels_give_the_twins_results_and_gradients(interpreted, assert_near):
    places = compressed_keys((0, 2, 2, 36), 1, torch.device("cpu"))  # two tiles of keys
    shapes = (36, HEADS, DIM), (36, DIM), (36, DIM), (HEADS,)
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    index = [torch.randint(-2, 3, shape).float() for shape in ((36, 3, 4), (36, 4), (36, 3))]
    chosen = choose_compressed(*index, places, TOP_K, scale=0.5)
    assert torch.equal(chosen, choose_compressed_plain(*index, places, TOP_K, 0.5))
    upstream, results = torch.randn(shapes[0]), []
    for dtype in (torch.float32, torch.float64):  # the kernels, and the twin
        inputs = [x.to(dtype) for x in operands]
        out = compressed_attention(*inputs, places, scale=0.3, window=WINDOW, chosen=chosen)
        results.append([out, *torch.autograd.grad(out, operands, upstream.to(dtype))])
    # Sums of up to 36 terms, each of which is rounded a few times.
    for found, truth in zip(*results, strict=True):
        assert_near(found, truth, 40)
