"""The loss of indexers in a whole model (layers/model/indexer_loss.py)."""

from __future__ import annotations

import importlib

import pytest
import torch
from pairs import make_pair

from liger_models.convert.errors import DataError
from liger_models.kernels.attention.chosen_keys import chosen_mask
from liger_models.layers.attention import indexer as module

kernels = importlib.import_module("liger_models.kernels.attention.indexer_loss")

FAMILIES = ["deepseek_v32", "hy_v4", "dots3_note_text", "deepseek_v4"]
OF_TOKENS = FAMILIES[:3]  # whose indexers choose among tokens
LENGTHS = [11, 1, 4, 3]  # of 19 tokens; indexers choose 5 keys


@pytest.fixture
def pair(request):
    pair = make_pair(request.param)
    pair.ours.double().train_indexers()
    return pair


def gradients(model, output):
    model.zero_grad()
    output.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_indexers(found):
    return {name: gradient for name, gradient in found.items() if ".indexer." in name}


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_packed_documents_have_the_loss_of_separate_ones_and_only_indexers_learn_from_it(pair):
    model, batch = pair.ours, pair.batch(rows=1)
    batch["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0)
    batch["labels"] = batch["input_ids"].clone()
    without = model(**batch)
    plain = gradients(model, without)
    assert not of_indexers(plain)
    expected, separate = 0.0, {}
    for ids in batch["input_ids"][0].split(LENGTHS):
        if len(ids) > 1:  # one key has nothing to learn
            own = model(ids[None], labels=ids[None], indexer_weight=0.7)
            share = len(ids) / sum(LENGTHS)
            expected += share * own.indexer_loss
            for name, gradient in of_indexers(gradients(model, own)).items():
                separate[name] = separate.get(name, 0.0) + share * gradient
    for level in ("lean", "checkpoint"):
        model.set_activation_memory(level)
        found = model(**batch, indexer_weight=0.7)
        torch.testing.assert_close(found.indexer_loss, expected, rtol=1e-5, atol=0)  # summed in float32
        torch.testing.assert_close(found.loss, without.loss + 0.7 * found.indexer_loss)
        packed = gradients(model, found)
        trained = of_indexers(packed)
        assert (
            trained.keys() == separate.keys() == {n for n, _ in model.named_parameters() if ".indexer." in n}
        )
        for name, gradient in trained.items():
            torch.testing.assert_close(gradient, separate[name], rtol=1e-6, atol=1e-9)
            assert gradient.abs().max() > 1e-6
        for name, gradient in plain.items():
            assert torch.equal(packed[name], gradient)


@pytest.mark.parametrize("pair", OF_TOKENS, indirect=True)
def test_the_target_is_the_mean_of_the_references_attention_weights(pair, monkeypatch):
    """With sinks, their share of them."""
    seen, original = [], module.indexer_loss

    def noted(q, k, weights, attention_q, attention_k, *, attention_scale, bounds, chosen, sinks, **options):
        mask = chosen_mask(chosen, bounds, len(q)) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
        products = torch.einsum("qhe,khe->hqk", attention_q, attention_k) * attention_scale
        products = products.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            products = torch.cat([products, sinks[:, None, None].expand(-1, len(q), 1)], -1)
        seen.append(products.softmax(-1)[..., : len(q)].sum(0))
        given = {"attention_scale": attention_scale, "bounds": bounds, "chosen": chosen, **options}
        return original(q, k, weights, attention_q, attention_k, sinks=sinks, **given)

    monkeypatch.setattr(module, "indexer_loss", noted)
    batch = pair.batch(rows=1)
    pair.ours.float()(**batch, indexer_weight=1.0)
    reference = pair.reference(**batch, use_cache=False, output_attentions=True).attentions
    own = [i for i, block in enumerate(pair.ours.spec.blocks) if block.mixer.indexer is not None]
    assert len(seen) == len(own)
    for layer, found in zip(own, seen, strict=True):
        # float32, in sums of other orders
        torch.testing.assert_close(found, reference[layer][0].sum(0), rtol=1e-5, atol=1e-6)


def test_the_target_of_compressed_keys_is_their_share_of_the_references_weights(monkeypatch):
    found, original = [], kernels._shares_of_compressed

    def noted(*operands):
        found.append(original(*operands))
        return found[-1]

    monkeypatch.setattr(kernels, "_shares_of_compressed", noted)
    pair = make_pair("deepseek_v4")
    batch = pair.clear(lambda: pair.batch(rows=1))
    pair.ours.train_indexers()
    pair.ours(**batch, indexer_weight=1.0)
    attentions = pair.reference(**batch, use_cache=False, output_attentions=True).attentions
    own = [i for i, block in enumerate(pair.ours.spec.blocks) if block.mixer.indexer is not None]
    tokens = batch["input_ids"].shape[1]
    for layer, shares in zip(own, found, strict=True):
        weights = attentions[layer][0, :, :, tokens:].sum(0)
        blind = weights.sum(-1) == 0  # the first tokens, before a whole key
        assert blind.any()
        assert torch.equal(blind, shares.sum(-1) == 0)
        expected = weights[~blind] / weights[~blind].sum(-1, keepdim=True)
        # float32, in sums of other orders
        torch.testing.assert_close(shares[~blind], expected, rtol=1e-5, atol=1e-6)


def test_a_call_that_would_train_nothing_is_refused():
    model = make_pair("deepseek_v32").ours
    ids = torch.randint(131, (1, 9))
    with pytest.raises(DataError, match="the indexers are frozen"):
        model(ids, labels=ids, indexer_weight=0.1)
    model.train_indexers()
    model.freeze("embed_tokens")
    assert all(p.requires_grad for n, p in model.named_parameters() if ".indexer." in n)
    with pytest.raises(DataError, match="pass labels"):
        model(ids, indexer_weight=0.1)
    with pytest.raises(ValueError, match="finite number"):
        model(ids, labels=ids, indexer_weight=-1.0)
    model.train_indexers(False)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".indexer." in n)
    llama = make_pair("llama").ours
    with pytest.raises(DataError, match="no layer of this model has an indexer"):
        llama(ids, labels=ids, indexer_weight=0.1)
    with pytest.raises(ValueError, match="no layer of this model has an indexer"):
        llama.train_indexers()
