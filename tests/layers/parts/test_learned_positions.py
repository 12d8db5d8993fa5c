"""Learned positions: vectors that are added to the embeddings."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

ROWS = 6


@pytest.fixture
def model():
    block = BlockSpec(AttentionSpec(2, 2, 8, 8**-0.5), MLPSpec(24, "gelu", gated=False), LayerNormSpec())
    made = CausalLM(ModelSpec(31, 16, (block,), LayerNormSpec(), learned_positions=ROWS))
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


def logits(model, ids, **documents):
    return model(ids, return_logits=True, **documents).logits


def test_positions_restart_with_each_document(model):
    ids = torch.arange(11)[None]
    together = logits(model, ids, cu_seqlens=torch.tensor([0, 6, 11], dtype=torch.int32))
    for start, end in ((0, 6), (6, 11)):
        alone = logits(model, ids[:, start:end])
        # Sums of at most 24 products in float32, in another order.
        assert (together[:, start:end] - alone).norm() <= 1e-5 * alone.norm()


def test_a_token_depends_on_its_position(model):
    ids = torch.tensor([[3]])
    first, last = (logits(model, ids, position_ids=torch.tensor([[i]])) for i in (0, ROWS - 1))
    assert (first - last).norm() > 0.01 * first.norm()


def test_a_position_beyond_the_table_is_refused(model):
    with pytest.raises(DataError, match="position 6 is beyond the 6 positions"):
        model(torch.arange(ROWS + 1)[None])


def test_a_trained_table_keeps_gradients_flowing_below_frozen_layers(model):
    model.requires_grad_(False)
    model.embed_positions.weight.requires_grad_()
    ids = torch.arange(ROWS)[None]
    model(ids, labels=ids).loss.backward()
    assert model.embed_positions.weight.grad.norm() > 0


def test_padding_takes_no_positions_if_the_model_counts_tokens_alone(model):
    """A padded row equals the row without padding only if its positions start at its first token."""
    spec = dataclasses.replace(model.spec, padding_has_positions=False, unused_positions=2)
    counting = CausalLM(spec)
    counting.reset_parameters(torch.Generator().manual_seed(1))
    ids, mask = torch.arange(ROWS)[None], torch.tensor([[0, 0, 1, 1, 0, 1]])
    found = logits(counting, ids, attention_mask=mask)[mask.bool()]
    alone = logits(counting, ids[mask.bool()][None])[0]
    assert (found - alone).norm() <= 1e-5 * alone.norm()  # sums of at most 24 products, in another order
    logits(counting, ids).sum().backward()
    gradient = counting.embed_positions.weight.grad
    assert gradient[:2].count_nonzero() == 0 < gradient[2:].count_nonzero()
