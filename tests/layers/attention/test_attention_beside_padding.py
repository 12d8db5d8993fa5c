"""Rows with bidirectional attention and padding at their end, whose queries see the row: ranges of keys, as
the kernel uses, give the result of an explicit mask.
"""

from __future__ import annotations

import pytest
import torch

from liger_models.kernels._dispatch import interpret, interpreted
from liger_models.layers.attention.backends import attend
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec

REAL = [5, 8, 1]  # of 8 tokens per row


@pytest.mark.skipif(not interpreted, reason="on a GPU tests/vision/test_gpu.py runs the kernel itself")
def test_key_ranges_equal_a_full_mask():
    spec = AttentionSpec(2, 2, 16, 0.25, causal=False)
    torch.manual_seed(0)
    given = torch.randn(3, 24, 2, 16), torch.randn(24, 2, 16)

    def results():
        sequences = Sequences.from_call((3, 8), torch.device("cpu"))
        padding = (torch.arange(8) >= torch.tensor(REAL)[:, None]).flatten()
        sequences.visibility = Visibility(sequences.documents, padding=padding)
        qkv = given[0].clone().requires_grad_()
        out = attend(*qkv, spec, sequences)
        out.backward(given[1])
        return out.detach(), qkv.grad

    expected = results()
    with interpret():
        found = results()
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.skipif(not interpreted, reason="on a GPU tests/vision/test_gpu.py runs the kernel itself")
@pytest.mark.parametrize("lengths", [[8, 8, 8], [11, 3, 10]])
def test_key_ranges_of_hidden_tokens_equal_products_of_the_shown_ones(lengths):
    """Tokens at the end of a document attend to the others, and no token attends to them."""
    spec, hidden = AttentionSpec(2, 2, 16, 0.25, causal=False), (3, 0, 1)
    torch.manual_seed(0)
    given = torch.randn(3, 24, 2, 16), torch.randn(24, 2, 16)

    def results():
        sequences = Sequences.of_lengths(lengths, torch.device("cpu"))
        sequences.visibility = Visibility(sequences.documents, hidden=hidden)
        qkv = given[0].clone().requires_grad_()
        out = attend(*qkv, spec, sequences)
        out.backward(given[1])
        return out.detach(), qkv.grad

    expected = results()
    assert bool((expected[1][1:, 5 if lengths[0] == 8 else 8] == 0).all())  # keys and values of a hidden one
    with interpret():
        found = results()
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


def test_padding_attends_to_all_tokens():
    sequences = Sequences.from_call((3, 8), torch.device("cpu"))
    padding = (torch.arange(8) >= torch.tensor(REAL)[:, None]).flatten()
    sequences.visibility = Visibility(sequences.documents, padding=padding)
    first, end = sequences.visibility.ranges_with_padding().of_queries.view(2, 3, 8)
    assert first.tolist() == [[0] * 8, [8] * 8, [16] * 8]
    assert end.tolist() == [[8] * 5 + [5] * 3, [16] * 8, [24] + [17] * 7]
