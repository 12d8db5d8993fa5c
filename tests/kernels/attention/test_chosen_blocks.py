"""choose_blocks, and attention to the chosen blocks, on a CPU and in the interpreter."""

import importlib
import itertools

import pytest
import torch
from masked_attention import check_attention_to_mask
from visited_tiles import check_visits

from liger_models.kernels import ChosenBlocks, attention, choose_blocks, document_bounds
from liger_models.kernels.attention.chosen_blocks import blocks_mask, choose_blocks_plain

chosen_blocks = importlib.import_module("liger_models.kernels.attention.chosen_blocks")
flash_attention = importlib.import_module("liger_models.kernels.attention.flash_attention")

# An empty document, short ones in which all blocks are chosen, and long ones.
PACKED = (0, 3, 3, 4, 10, 47)
CHOICE = {"size": 3, "local": 2, "longest": 37}
TOP_K = 4


def documents(cu_seqlens):
    return document_bounds(torch.tensor(cu_seqlens), cu_seqlens[-1])


def operands(tokens, groups=2, dim=5, dtype=torch.float32):
    torch.manual_seed(tokens)
    return torch.randn(tokens, groups, dim, dtype=dtype), torch.randn(tokens, dim, dtype=dtype)


def by_hand(q, k, cu_seqlens):
    """The keys of each query and group, one query at a time."""
    size, found = CHOICE["size"], []
    for first, end in itertools.pairwise(cu_seqlens):
        for t, group in itertools.product(range(first, end), range(q.shape[1])):
            scores = (k[first : t + 1] @ q[t, group]).tolist()
            blocks = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
            local = list(range(len(blocks)))[-CHOICE["local"] :]
            others = sorted(set(range(len(blocks))) - set(local), key=lambda b, s=blocks: -s[b])
            best = {*local, *others[: TOP_K - len(local)]}
            found.append({first + i for i in range(len(scores)) if i // size in best})
    return found


def keys_of(chosen, bounds):
    """The keys of each query and group that the bits name, up to the query."""
    mask = blocks_mask(chosen, bounds, len(chosen.bits)).tril().transpose(0, 1).flatten(0, 1)
    return [set(row.nonzero()[:, 0].tolist()) for row in mask]


@pytest.mark.parametrize("form", ["twin", "kernel"])
def test_the_local_and_the_best_blocks_are_chosen(form, request, monkeypatch):
    """The kernel in slices of a few queries, of which tiles have several documents."""
    if form == "kernel":
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(chosen_blocks, "_SLICE", 2 * 13 * 20)
    q, k = operands(PACKED[-1])
    bounds = documents(PACKED)
    chosen = choose_blocks(q, k, TOP_K, bounds=bounds, **CHOICE)
    assert chosen.bits.shape == (PACKED[-1], 2, 1)
    assert keys_of(chosen, bounds) == by_hand(q, k, PACKED)
    later = choose_blocks(q[41:], k, TOP_K, bounds=bounds, first_query=41, **CHOICE)
    assert torch.equal(later.bits, chosen.bits[41:])


def test_the_kernel_counts_blocks_of_more_keys_than_a_tile(interpreted):
    q, k = operands(150)
    choice = {"size": 72, "local": 0, "longest": 150}
    found = choose_blocks(q, k, 1, **choice)
    expected = choose_blocks_plain(q, k, 1, 72, 0, 150, None, 0)
    assert keys_of(found, None) == keys_of(expected, None)


@pytest.mark.parametrize("size", [8, 40], ids=["several in a tile", "larger than a tile"])
def test_attention_to_chosen_blocks(size, interpreted, monkeypatch):
    """Each head has blocks of its own, and both have the same keys. Tiles are small, so that few tokens fill
    several. With small blocks some tiles have no chosen key, since queries are alike.
    """
    tiles = flash_attention.Tiles(16, 32, 4, 1)
    monkeypatch.setattr(
        flash_attention, "_configuration", lambda *_: flash_attention.Configuration(*[tiles] * 3)
    )
    cu_seqlens = (0, 3, 3, 4, 70) if size == 8 else (0, 7, 90)
    tokens, bounds = cu_seqlens[-1], documents(cu_seqlens)
    index_q, index_k = operands(tokens)
    index_q = index_q[:1].repeat(tokens, 1, 1) if size == 8 else index_q
    chosen = choose_blocks(index_q, index_k, 2, size=size, local=1, longest=tokens, bounds=bounds)
    mask = blocks_mask(chosen, bounds, tokens).tril()
    check_visits(tiles, mask, chosen.bits, size, bounds, some_skipped=size == 8)
    check_attention_to_mask(mask, 8, bounds=bounds, chosen=chosen)


def test_bad_input_is_refused():
    q, k = operands(20)
    with pytest.raises(ValueError, match="1 blocks of 3 keys, 2 of them local"):
        choose_blocks(q, k, 1, **CHOICE)
    with pytest.raises(ValueError, match="with t of the T tokens"):
        choose_blocks(q, k, 4, first_query=1, **CHOICE)
    v = torch.randn(20, 3, 5)
    with pytest.raises(ValueError, match=r"expected \[20, a divisor of 3, words\] int32"):
        attention(v, v, v, chosen=ChosenBlocks(torch.zeros(20, 2, 1, dtype=torch.int32), 3))
