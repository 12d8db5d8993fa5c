"""Attention with scores by distance, in blocks of queries, against its formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from liger_models.layers.recurrent import relative_scores
from liger_models.layers.recurrent.relative_scores import attend_with_distances, biases_by_distance

HEADS, KV_HEADS, DIM, WIDTH, SCALE = 4, 2, 6, 3, 0.7
LENGTHS = [1, 9, 0, 14]


@pytest.fixture
def operands():
    torch.manual_seed(0)
    shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM), (HEADS, WIDTH)
    return [torch.randn(sum(LENGTHS), *shape, dtype=torch.float64) for shape in shapes]


def by_hand(q, k, v, r, profiles, window):
    """One document, score by score."""
    out = torch.zeros_like(q)
    for i, head in itertools.product(range(len(q)), range(HEADS)):
        group, scores = head * KV_HEADS // HEADS, []
        first = 0 if window is None else max(0, i - window + 1)
        for j in range(first, i + 1):
            near = r[i, head] @ profiles[:, i - j] if i - j < profiles.shape[1] else 0.0
            scores.append(SCALE * q[i, head] @ k[j, group] + near)
        out[i, head] = torch.stack(scores).softmax(0) @ v[first : i + 1, group]
    return out


@pytest.mark.parametrize("queries", [1, 4, 256])
@pytest.mark.parametrize(("window", "extent"), [(None, 5), (None, 30), (5, 5), (5, 3), (1, 1)])
def test_packed_documents_equal_the_formula_in_values_and_gradients(
    operands, window, extent, queries, monkeypatch
):
    """With distances beyond the profiles and beyond the documents, in blocks of one query or more."""
    monkeypatch.setattr(relative_scores, "_QUERIES", queries)
    operands = [x.requires_grad_() for x in (*operands, torch.randn(WIDTH, extent, dtype=torch.float64))]
    *by_token, profiles = operands
    boundaries = [0, *itertools.accumulate(LENGTHS)]
    found = attend_with_distances(*operands, SCALE, window, boundaries)
    documents = zip(*(x.split(LENGTHS) for x in by_token), strict=True)
    expected = torch.cat([by_hand(*own, profiles, window) for own in documents])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, operands, cotangent, allow_unused=True) for y in (found, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


def test_blocks_have_a_bounded_number_of_scores(monkeypatch):
    monkeypatch.setattr(relative_scores, "_SCORES", 1 << 12)
    blocks = list(relative_scores._blocks(HEADS, None, [0, 300, 700]))
    sizes = [(own.stop - own.start, seen.stop - seen.start) for own, seen in blocks]
    assert sum(queries for queries, _ in sizes) == 700
    # A block's queries see the keys before it, and one another.
    assert max(HEADS * queries * (keys - queries + 1) for queries, keys in sizes) <= 1 << 12


def test_biases_of_cached_keys_are_those_of_a_whole_document(operands):
    r = operands[3][:9].transpose(0, 1)
    profiles = torch.randn(WIDTH, 4, dtype=torch.float64)
    whole = relative_scores._biases(r, profiles, 9, 6)
    place = torch.arange(9)
    distances = place[5:, None] - place
    mask = (distances >= 0) & (distances < 6)
    found = biases_by_distance(r[None, :, 5:], profiles, distances[None], mask[None])
    assert torch.equal(found[0].isinf(), whole[:, 5:].isinf())
    torch.testing.assert_close(found[0], whole[:, 5:], rtol=1e-13, atol=1e-13)
