"""choose_keys, and attention to the chosen keys, on a CPU and in the interpreter."""

import importlib
import itertools

import pytest
import torch
from masked_attention import check_attention_to_mask
from visited_tiles import check_visits

from liger_models.kernels import attention, choose_keys, document_bounds, key_ranges
from liger_models.kernels.attention.chosen_keys import chosen_mask

chosen_keys = importlib.import_module("liger_models.kernels.attention.chosen_keys")
flash_attention = importlib.import_module("liger_models.kernels.attention.flash_attention")

# An empty document, short ones in which all keys are chosen, and long ones.
PACKED = (0, 3, 3, 4, 10, 47)
TOP_K = 8


def documents(cu_seqlens):
    return document_bounds(torch.tensor(cu_seqlens), cu_seqlens[-1])


def operands(tokens, heads=3, dim=5, dtype=torch.float32):
    torch.manual_seed(tokens)
    q, k = torch.randn(tokens, heads, dim, dtype=dtype), torch.randn(tokens, dim, dtype=dtype)
    return q, k, torch.randn(tokens, heads)


def by_hand(q, k, weights, scale, cu_seqlens):
    """The keys of each query, one query at a time."""
    found = []
    for first, end in itertools.pairwise(cu_seqlens):
        for t in range(first, end):
            scores = (weights[t, :, None] * torch.relu(q[t] @ k[first : t + 1].T * scale)).sum(0)
            order = sorted(range(len(scores)), key=lambda i, s=scores: (-s[i].item(), i))
            found.append({first + i for i in order[:TOP_K]})
    return found


def keys_of(chosen, bounds):
    """The keys of each query that the bits name, up to itself."""
    mask = chosen_mask(chosen, bounds, len(chosen)).tril()
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


def test_the_plain_twin_chooses_the_highest_scores():
    q, k, weights = operands(PACKED[-1], dtype=torch.float64)
    bounds = documents(PACKED)
    chosen = choose_keys(q, k, weights, TOP_K, scale=0.4, longest=37, bounds=bounds)
    assert chosen.shape == (PACKED[-1], 3)
    assert keys_of(chosen, bounds) == by_hand(q, k, weights.double(), 0.4, PACKED)


def test_of_equal_scores_the_earlier_key_goes_first():
    q, k, weights = operands(40)
    chosen = choose_keys(-q.abs(), k.abs(), weights, TOP_K, scale=1.0, longest=40)  # all scores are zero
    assert keys_of(chosen, None) == [set(range(min(t + 1, TOP_K))) for t in range(40)]


@pytest.mark.parametrize("in_registers", [1 << 14, 32], ids=["in registers", "in blocks"])
def test_the_kernels_choose_what_the_twin_chooses(in_registers, interpreted, monkeypatch):
    """In slices of four queries, which are not the first."""
    monkeypatch.setattr(chosen_keys, "_IN_REGISTERS", in_registers)
    monkeypatch.setattr(chosen_keys, "_SLICE", 4 * 38)
    q, k, weights = operands(PACKED[-1])
    bounds = documents(PACKED)
    found = choose_keys(q[41:], k, weights[41:], TOP_K, scale=0.4, longest=37, bounds=bounds, first_query=41)
    options = (TOP_K, 0.4, 37, bounds, 41)
    expected = chosen_keys.choose_keys_plain(q[41:], k, weights[41:], *options)
    assert torch.equal(found, expected)


def test_short_documents_have_all_bits_set(interpreted):
    q, k, weights = operands(6)
    assert choose_keys(q, k, weights, TOP_K, scale=0.4, longest=37).eq(-1).all()


@pytest.mark.parametrize("cu_seqlens", [(0, 3, 3, 4, 24), (0, 20)], ids=["packed", "one document"])
def test_attention_to_chosen_keys(cu_seqlens, interpreted, monkeypatch):
    """Small tiles, so that few tokens fill several: whole ones, and those at both ends of a document."""
    tiles = flash_attention.Tiles(16, 32, 4, 1)
    monkeypatch.setattr(
        flash_attention, "_configuration", lambda *_: flash_attention.Configuration(*[tiles] * 3)
    )
    tokens, bounds = cu_seqlens[-1], documents(cu_seqlens) if len(cu_seqlens) > 2 else None
    chosen = choose_keys(*operands(tokens), TOP_K, scale=0.4, longest=40, bounds=bounds)
    mask = chosen_mask(chosen, bounds, tokens).tril()
    check_attention_to_mask(mask, 5, bounds=bounds, chosen=chosen)


def test_tiles_without_a_chosen_key_are_skipped(interpreted):
    """Words with few bits, those of other documents and of later keys among them."""
    torch.manual_seed(0)
    tokens, bounds = 90, documents((0, 7, 90))
    chosen = torch.ones(tokens, 4, dtype=torch.int32) << torch.randint(32, (tokens, 4))
    chosen = (chosen * (torch.rand(tokens, 4) < 0.1)).int()
    chosen[16:32] = torch.tensor([1, 0, 0, 0])  # key 0, of the document before
    mask = chosen_mask(chosen, bounds, tokens).tril()[None]
    check_visits(flash_attention.Tiles(16, 32, 4, 1), mask, chosen, 0, bounds, some_skipped=True)


def test_bad_input_is_refused():
    q, k, weights = operands(20)
    with pytest.raises(ValueError, match="top_k is 0"):
        choose_keys(q, k, weights, 0, scale=1.0, longest=20)
    with pytest.raises(ValueError, match="with t of the T tokens"):
        choose_keys(q, k, weights, 4, scale=1.0, longest=20, first_query=1)
    chosen = choose_keys(q, k, weights, 4, scale=1.0, longest=20)
    v = k[:, None]
    with pytest.raises(ValueError, match="without window"):
        attention(v, v, v, window=3, chosen=chosen)
    with pytest.raises(ValueError, match="without window"):
        attention(v, v, v, bounds=key_ranges(documents((0, 20))), chosen=chosen)
    with pytest.raises(ValueError, match=r"expected \[20, words\] int32"):
        attention(v, v, v, chosen=chosen[1:])
