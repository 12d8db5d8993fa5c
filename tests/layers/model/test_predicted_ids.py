"""Models that never predict the last ids of their vocabulary, although the head has rows for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from liger_models.convert.errors import ConfigError, DataError
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec
from liger_models.models.vocabulary import check_vocabulary

VOCAB, PREDICTED = 23, 19
BLOCK = BlockSpec(AttentionSpec(2, 1, 4, 0.5), MLPSpec(12), NormSpec())
SPEC = ModelSpec(VOCAB, 8, (BLOCK,), NormSpec(), predicted_ids=PREDICTED)


class Wrapped(nn.Module):
    """A head that computes only the product, as an adapter does."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.head.weight)


@pytest.fixture
def models(randomised):
    """A model, the same one with a wrapped head, and one without the rows that are never predicted."""
    torch.manual_seed(0)
    model = randomised(CausalLM(SPEC))
    wrapped, narrow = CausalLM(SPEC), CausalLM(replace(SPEC, predicted_ids=None))
    wrapped.load_state_dict(model.state_dict())
    wrapped.lm_head = Wrapped(wrapped.lm_head)
    narrow.load_state_dict(model.state_dict())
    with torch.no_grad():
        narrow.lm_head.weight = nn.Parameter(model.lm_head.weight[:PREDICTED].clone())
    return model, wrapped, narrow


def test_loss_logits_and_scores_are_those_of_a_head_with_fewer_rows(models):
    ids = torch.randint(PREDICTED, (2, 9))
    *own, narrow = models
    expected, scores = narrow(ids, labels=ids, return_logits=True), narrow.score(ids, ids).log_probs
    for model in own:
        found = model(ids, labels=ids, return_logits=True)
        assert found.logits.shape == (2, 9, PREDICTED)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(model.score(ids, ids).log_probs, scores)


def test_rows_that_are_never_predicted_get_no_gradient(models):
    ids = torch.randint(PREDICTED, (2, 9))
    models[0](ids, labels=ids).loss.backward()
    assert not models[0].lm_head.weight.grad[PREDICTED:].any()
    assert models[0].lm_head.weight.grad[:PREDICTED].any(1).all()


def test_labels_that_are_never_predicted_are_refused_and_ids_are_not(models):
    ids = torch.full((1, 5), PREDICTED)
    assert models[0](ids).logits.isfinite().all()
    with pytest.raises(DataError, match=f"{PREDICTED}"):
        models[0](ids, labels=ids)


def test_another_size_of_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="cannot change its size"):
        check_vocabulary(SPEC, VOCAB + 1)
    with pytest.raises(ValueError, match="cannot change"):
        SPEC.resized(VOCAB + 1)
