"""attention over trees of documents, against each document run alone after its parent's tokens."""

import importlib
import itertools

import pytest
import torch
from attention_forms import operands
from operation_runs import in_float64, run_with_gradients

from liger_models.kernels import attention, document_bounds, key_ranges, tree_ranges

module = importlib.import_module("liger_models.kernels.attention.flash_attention")

# A prompt over several tiles, one of whose answers is empty and one a single token; a document that nothing
# continues; a short prompt, whose answers share a tile with it; a prompt without answers.
LENGTHS = (37, 20, 0, 1, 26, 9, 3, 4, 5, 18, 2)
PARENTS = (-1, 0, 0, 0, 0, -1, -1, 6, 6, 6, -1)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
TOKENS = BOUNDS[-1]
# Tokens of its prompt that an answer continues: all, or a part, which may lie wholly outside the window.
WHOLE = (0, 37, 37, 37, 37, 0, 0, 3, 3, 3, 0)
PARTS = (0, 37, 37, 30, 5, 0, 0, 2, 1, 0, 0)
every_tree = pytest.mark.parametrize("shared", [WHOLE, PARTS], ids=["whole prompts", "parts of prompts"])

# Tokens that all attend to one another, like an image's: over two tiles of a prompt, and in an answer.
AHEAD = ((5, 21), (40, 44))
SPANS = torch.arange(TOKENS).repeat(2, 1) + torch.tensor([[0], [1]])
for first, end in AHEAD:
    SPANS[:, first:end] = torch.tensor([[first], [end]])
SPANS = SPANS.int()

LIMITS = {
    "all": {},
    "spans": {"spans": SPANS},
    "spans and a window": {"spans": SPANS, "window": 9},
    "window": {"window": 9},
    "a window that reaches into every prompt": {"window": 30},
    "chunk": {"chunk": 16},
    "both": {"window": 9, "chunk": 16},
}
every_limit = pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)


@pytest.fixture
def small_tiles(monkeypatch):
    tiles = (module.Tiles(16, 16, 4, 1), module.Tiles(16, 32, 4, 1), module.Tiles(16, 32, 4, 1))
    monkeypatch.setattr(module, "_configuration", lambda *_: module.Configuration(*tiles))


def rows_of(document, shared):
    """Rows of the tokens that a document continues, then of its own tokens, in order of position."""
    first = BOUNDS[PARENTS[document]] if PARENTS[document] >= 0 else 0
    own = range(BOUNDS[document], BOUNDS[document + 1])
    return [*range(first, first + shared[document]), *own]


def visible_by_hand(shared, window=None, chunk=None, spans=None):
    """[TOKENS, TOKENS] bool mask, made from the positions within each document."""
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for document in range(len(LENGTHS)):
        rows = rows_of(document, shared)
        for position, query in enumerate(rows):
            first = 0 if window is None else max(0, position - window + 1)
            first = first if chunk is None else max(first, position // chunk * chunk)
            visible[query, rows[first : position + 1]] = True
    for first, end in AHEAD if spans is not None else ():
        visible[first:end, first:end] |= torch.ones(end - first, end - first).triu().bool()
    return visible


def one_by_one(limits, shared, **options):
    """Function of q, k, v and, optionally, sinks that runs each document alone after the tokens it continues.

    The tokens of a prompt take part in the run of each of its answers; the result of the first run is kept.
    """

    def run(q, k, v, sinks=None):
        found = {}
        for document in range(len(LENGTHS)):
            rows = rows_of(document, shared)
            if not rows:
                continue
            cuts, chunk = [0, len(rows)], limits.get("chunk")
            if chunk is not None:
                cuts = [*range(0, len(rows), chunk), len(rows)]
            given = options | {"window": limits.get("window"), "sinks": sinks}
            given |= {"cu_seqlens": torch.tensor(cuts)}
            if "spans" in limits:
                bounds = document_bounds(given.pop("cu_seqlens"), len(rows))
                spans = (SPANS[:, rows] + torch.arange(len(rows)) - torch.tensor(rows)).int()
                given |= {"bounds": key_ranges(bounds, spans, given.pop("window"))}
            alone = attention(q[rows], k[rows], v[rows], **given)
            for token, row in zip(rows, alone.unbind(), strict=True):
                found.setdefault(token, row)
        return torch.stack([found[token] for token in range(TOKENS)])

    return run


@every_limit
@every_tree
def test_ranges_of_queries_and_of_keys_agree(limits, shared):
    ranges = tree_ranges(BOUNDS, PARENTS, torch.device("cpu"), **limits, shared=shared)
    visible = visible_by_hand(shared, **limits)
    token = torch.arange(TOKENS)
    for rows, expected in ((ranges.of_queries, visible), (ranges.of_keys, visible.T)):
        hits = [(token >= a[:, None]) & (token < b[:, None]) for a, b in rows.unflatten(0, (-1, 2))]
        assert torch.equal(torch.stack(hits).sum(0), expected.long())  # once each: they do not overlap
    assert torch.equal(module.visible_keys(TOKENS, ranges, None, token.device), visible)
    # Without limits, the answers that attend to a token of a prompt form one range of queries.
    assert len(ranges.of_keys) == (8 if {"window", "chunk"} & limits.keys() else 4)
    there = ranges.of_keys[::2] < ranges.of_keys[1::2]
    assert torch.equal(there.sort(0, descending=True).values, there)  # empty ones come last


@pytest.mark.parametrize(
    ("limits", "shared"),
    [
        ({}, WHOLE),
        ({"window": 30}, PARTS),
        ({"window": 9, "chunk": 16}, WHOLE),
        ({"window": 9, "spans": SPANS}, PARTS),
    ],
    ids=["all", "window", "both", "spans"],
)
def test_a_tree_equals_its_documents_one_by_one(limits, shared, implementation, small_tiles, assert_near):
    inputs = operands(TOKENS, heads=1 if limits else 2, kv_heads=1, sinks=True)
    ranges = tree_ranges(BOUNDS, PARENTS, torch.device("cpu"), **limits, shared=shared)
    options = {"softcap": 1.5, "scale": 0.6}

    def tree(q, k, v, sinks):
        return attention(q, k, v, bounds=ranges, sinks=sinks, **options)

    found, grads, upstream = run_with_gradients(tree, inputs)
    truth, true_grads, _ = run_with_gradients(
        one_by_one(limits, shared, **options), in_float64(inputs), in_float64(upstream)
    )
    # As in test_flash_attention.py; gradients of a prompt sum over its answers.
    assert_near(found[0], truth[0], 16)
    for actual, true in zip(grads, true_grads, strict=True):
        assert_near(actual, true, 48)


def test_without_answers_it_equals_packed_documents(implementation, small_tiles):
    inputs = operands(50, heads=1, kv_heads=1)
    bounds = document_bounds(torch.tensor((0, 23, 50)), 50)
    ranges = tree_ranges((0, 23, 50), (-1, -1), torch.device("cpu"), window=9)
    found, grads, upstream = run_with_gradients(lambda *x: attention(*x, bounds=ranges), inputs)
    same, same_grads, _ = run_with_gradients(
        lambda *x: attention(*x, bounds=bounds, window=9), inputs, upstream
    )
    for a, b in zip((*found, *grads), (*same, *same_grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("limits", [{}, {"window": 17}], ids=["all", "window"])
def test_fully_masked_tiles_are_skipped(limits, interpreted, small_tiles):
    """NaN passes through a mask that multiplies by zero, but not through a tile that is skipped."""
    bounds, parents = (0, 32, 96, 128), (-1, 0, 0)
    ranges = tree_ranges(bounds, parents, torch.device("cpu"), **limits)
    q, k, v = operands(128, heads=1, kv_heads=1)
    with torch.no_grad():
        expected = attention(q, k, v, bounds=ranges)
        values = v.clone()
        values[32:96] = float("nan")
        assert torch.equal(attention(q, k, values, bounds=ranges)[96:], expected[96:])
    dout = torch.randn(128, 1, 8)
    if limits:  # only the first 16 tokens of each answer attend to the prompt
        dout[48:96], dout[112:] = float("nan"), float("nan")
        kept = slice(0, 32)
    else:
        dout[96:] = float("nan")
        kept = slice(32, 96)
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, bounds=ranges), (q, k, v), dout)
    assert dk[kept].isfinite().all()
    assert dv[kept].isfinite().all()
    assert dq[kept].isfinite().all()
    assert dk[96:].isnan().any()
