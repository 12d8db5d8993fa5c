"""Embeddings of ids, normalised."""

from __future__ import annotations

import torch

from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

EPS = 0.3


def test_embeddings_of_ids_are_normalised_and_those_of_a_caller_are_not():
    block = BlockSpec(AttentionSpec(2, 2, 8, 8**-0.5), MLPSpec(24), NormSpec())
    model = CausalLM(ModelSpec(31, 16, (block,), NormSpec(), id_norm=NormSpec(EPS, weighted=False)))
    model.reset_parameters(torch.Generator().manual_seed(0))
    ids = torch.arange(7)[None]
    rows = model.embed_tokens.weight[ids]
    normed = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(model.embed_tokens(ids), normed, rtol=1e-5, atol=1e-6)
    given = model(inputs_embeds=model.embed_tokens(ids), return_logits=True).logits
    assert torch.equal(given, model(ids, return_logits=True).logits)
