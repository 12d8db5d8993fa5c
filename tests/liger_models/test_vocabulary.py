"""Models with a vocabulary of another size."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import ConfigError, DataError


def tiny(family, **changes):
    config = {k: v for k, v in find_architecture(family).tiny.items() if v is not ...}
    torch.manual_seed(0)
    model = liger_models.from_config({**config, **changes}, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [140, 120])
def test_a_resized_model_is_the_old_one_on_old_tokens_and_transformers_loads_it(size, tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = tiny("gemma2", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "old", max_shard_size="100KB")
    model = liger_models.from_hub(tmp_path / "old", device="cpu").eval()
    ids, old = torch.randint(5, 120, (2, 9)), dict(model.state_dict())
    head, logits = model.lm_head.weight.detach().clone(), model(ids).logits
    assert model.resize_token_embeddings(size) is model.embed_tokens
    kept = min(size, 131)
    assert torch.equal(model.embed_tokens.weight[:kept], old["embed_tokens.weight"][:kept])
    assert torch.equal(model.lm_head.weight[:kept], head[:kept])
    for new, table in ((model.embed_tokens.weight, old["embed_tokens.weight"]), (model.lm_head.weight, head)):
        for row in new[131:]:  # float32: a mean of 131 numbers, summed in another order
            torch.testing.assert_close(row, table.mean(0), rtol=1e-5, atol=1e-6)
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    found = model(ids, labels=ids, return_logits=True).logits
    assert found.shape[-1] == model.config.vocab_size == model.spec.vocab_size == size
    torch.testing.assert_close(found[..., :kept], logits[..., :kept], rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match=f"outside the vocabulary of {size}"):
        model(torch.tensor([[size]]))
    model.save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == size
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    sizes = [
        x.nbytes
        for file in set(index["weight_map"].values())
        for x in load_file(tmp_path / "new" / file).values()
    ]
    assert index["metadata"]["total_size"] == sum(sizes)
    again = liger_models.from_hub(tmp_path / "new", device="cpu").eval()
    assert torch.equal(again(ids).logits, found)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", attn_implementation="eager")
    expected = theirs.eval()(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert model.generate(ids, max_new_tokens=2).shape == (2, 11)


def test_new_tokens_take_at_most_their_share_of_the_probability():
    model = tiny("llama", tie_word_embeddings=False)
    ids = torch.randint(5, 120, (2, 9))
    before = model(ids).logits.log_softmax(-1)
    model.resize_token_embeddings(150)
    after = model(ids).logits.log_softmax(-1)[..., :131]
    # Each old token keeps at least 131 / 150 of its probability.
    assert (after - before).min() >= torch.tensor(131 / 150).log() - 1e-5
    assert (after - before).max() <= 1e-5


def test_sizes_are_rounded_up_and_the_head_of_a_classifier_stays():
    model = tiny("llama")
    assert model.resize_token_embeddings(133, pad_to_multiple_of=64).num_embeddings == 192
    assert model.resize_token_embeddings(pad_to_multiple_of=100).num_embeddings == 200
    config = {k: v for k, v in find_architecture("llama").tiny.items() if v is not ...}
    classifier = liger_models.from_config(config, labels=3, device="cpu")
    classifier.resize_token_embeddings(140)
    assert classifier(torch.tensor([[139, 5]])).logits.shape == (1, 3)


@pytest.mark.parametrize("projections", ["fused", "split"])
def test_training_goes_on_after_a_resize(projections, tmp_path):
    model = tiny("llama").train()
    if projections == "split":
        model.split_projections()
    model.resize_token_embeddings(140)
    ids = torch.tensor([[135, 7, 139, 9]])
    model(ids, labels=ids).loss.backward()
    assert model.embed_tokens.weight.grad[135].abs().sum() > 0
    assert model.lm_head.weight.grad[139].abs().sum() > 0
    model.save_pretrained(tmp_path)
    assert torch.equal(liger_models.from_hub(tmp_path, device="cpu")(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", [*list_architectures(), *list_architectures(vision=True, audio=True)])
def test_configs_of_all_families_say_the_new_size(family):
    config = {k: v for k, v in find_architecture(family).tiny.items() if v is not ...}
    model = liger_models.from_config(config, device="meta")
    size = model.spec.vocab_size + 7
    if model.spec.extra_ids:
        with pytest.raises(ConfigError, match="more ids right after its vocabulary"):
            model.resize_token_embeddings(size)
        return
    if model.spec.per_layer_vocab_size is not None:
        with pytest.raises(ConfigError, match="have their own inputs for"):
            model.resize_token_embeddings(model.spec.per_layer_vocab_size + 1)
        return
    model.resize_token_embeddings(size)
    again = liger_models.from_config(model.config, device="meta")
    shapes = {name: tensor.shape for name, tensor in again.saved_tensors().items()}
    assert {name: tensor.shape for name, tensor in model.saved_tensors().items()} == shapes
    assert again.spec == model.spec
    assert again.weight_map() == model.weight_map()


def test_vocabularies_that_a_model_cannot_have_are_refused():
    model = tiny("llama")
    with pytest.raises(ConfigError, match="a vocabulary of 0 tokens"):
        model.resize_token_embeddings(0)
    vision = {k: v for k, v in find_architecture("qwen2_5_vl").tiny.items() if v is not ...}
    model = liger_models.from_config(vision, device="meta")
    with pytest.raises(ConfigError, match=f"would lack the id {model.spec.vision.image_id} of image tokens"):
        model.resize_token_embeddings(model.spec.vision.image_id)


@pytest.mark.parametrize("rows", [range(131, 140), range(100, 103), range(120, 135)])
def test_a_checkpoint_is_loaded_with_new_tokens(rows, tmp_path):
    model = tiny("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    found = liger_models.from_hub(tmp_path, new_tokens=rows, device="cpu")
    size = max(131, rows.stop)
    assert found.spec.vocab_size == found.config.vocab_size == size
    for new, old in ((found.embed_tokens, model.embed_tokens), (found.lm_head, model.lm_head)):
        kept = [i for i in range(131) if i not in rows]
        assert torch.equal(new.weight[kept], old.weight[kept])
        for i in rows:
            torch.testing.assert_close(new.weight[i], old.weight[: rows.start].mean(0), rtol=1e-5, atol=1e-6)
    if rows.start == 131:  # the same bits as in memory
        model.resize_token_embeddings(140)
        assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    for wrong in (range(132, 140), range(0, 140), range(131, 140, 2)):
        with pytest.raises(ConfigError, match="expected a range that begins at 1 to 131"):
            liger_models.from_hub(tmp_path, new_tokens=wrong, device="cpu")
