"""The loss of an indexer against its plain twin, whose gradients are autograd's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from liger_models.kernels import choose_keys, document_bounds, indexer_loss
from liger_models.kernels.attention import indexer_loss as module
from liger_models.kernels.attention.chosen_keys import chosen_mask
from liger_models.kernels.attention.indexer_loss import indexer_loss_plain

LENGTHS = (37, 1, 50, 12)
SCALES = {"scale": 0.4, "attention_scale": 0.3}


@pytest.mark.parametrize("top_k", [None, 6], ids=["all keys, sinks", "chosen keys"])
def test_the_loss_and_its_gradients_equal_the_plain_form_of_every_document(monkeypatch, top_k):
    """Also with several slices of queries, whose keys begin in the middle of a document."""
    torch.manual_seed(0)
    sinks = torch.randn(4).double() if top_k is None else None
    tokens, longest = sum(LENGTHS), max(LENGTHS)
    q, weights = torch.randn(tokens, 5, 8).double(), torch.randn(tokens, 5).double()
    k = torch.randn(tokens, 8).double()
    others = torch.randn(tokens, 4, 6).double(), torch.randn(tokens, 2, 6).double()
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    bounds = document_bounds(edges.int(), tokens)
    chosen = None
    if top_k is not None:
        options = {"scale": SCALES["scale"], "longest": longest, "bounds": bounds}
        chosen = choose_keys(q, k, weights, top_k, **options)
    own = [x.requires_grad_() for x in (q, k, weights)]

    expected = q.new_zeros(())
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if chosen is not None:
        seen = seen & chosen_mask(chosen, bounds, tokens)
        assert (seen.sum(1) <= top_k).all()
    for start, stop in pairwise(edges):
        part = slice(start, stop)
        of_document = [x[part] for x in (*own, *others)]
        expected = expected + indexer_loss_plain(*of_document, **SCALES, seen=seen[part, part], sinks=sinks)

    monkeypatch.setattr(module, "_SLICE", 13 * longest)
    found = indexer_loss(*own, *others, **SCALES, bounds=bounds, chosen=chosen, longest=longest, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    theirs = torch.autograd.grad(3.0 * expected, own)
    for ours, gradient in zip(torch.autograd.grad(3.0 * found, own), theirs, strict=True):
        torch.testing.assert_close(ours, gradient, rtol=1e-9, atol=1e-12)
