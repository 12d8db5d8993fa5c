"""Base models, which have no head, match transformers' classes in hidden states, gradients and files."""

import json

import pytest
import torch
from randomised import randomise
from rounding import beyond_bound

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.models.base_model import LigerBaseModel, as_base, pooled

transformers = pytest.importorskip("transformers")
MODELS = transformers.AutoModel._model_mapping._model_mapping

# EmbeddingGemma's form; windows; experts that files hold one by one; and joined projections.
CASES = {
    "gemma3_text": {"use_bidirectional_attention": True},
    "qwen3": {},
    "qwen3_moe": {},
    "gpt_neox": {},
}


def config_of(family, **changes):
    tiny = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    return {**tiny, **changes}


@pytest.fixture(scope="module", params=CASES)
def theirs(request, tmp_path_factory):
    """transformers' base model, with random parameters, and its checkpoint."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config_of(request.param, **CASES[request.param]))
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config)
    randomise(model)
    model.train().save_pretrained(folder := tmp_path_factory.mktemp(request.param))
    return model, folder


def padded(vocab_size, side):
    ids = torch.randint(0, vocab_size, (2, 17))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 6) if side == "left" else slice(11, 17)] = 0
    return ids, mask


def near(found, expected):
    """The usual float32 bound: 1e-5 of the largest element."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_embeddings_and_gradients_agree(theirs, side):
    reference, folder = theirs
    ours = liger_models.from_hub(folder, device="cpu")
    assert type(ours) is LigerBaseModel
    assert ours.lm_head is None
    ids, mask = padded(ours.spec.vocab_size, side)
    output = ours(ids, attention_mask=mask, output_hidden_states=True)
    expected = reference(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
    near(output.last_hidden_state, expected)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    upstream = torch.randn_like(expected)
    output.last_hidden_state.backward(upstream)
    found = {}
    for native, parameter in ours.named_parameters():
        found |= ours.weight_map()[native].write(parameter.grad)
    named = (
        found.keys() & dict(reference.named_parameters()).keys()
    )  # not of experts, which files name otherwise

    def gradients():
        reference.zero_grad()
        hidden = reference(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
        (hidden * upstream).sum().backward()
        return {name: p.grad.clone() for name, p in reference.named_parameters() if name in named}

    assert not beyond_bound({name: found[name] for name in named}, gradients)
    last = torch.stack([row[where.bool()][-1] for row, where in zip(expected, mask, strict=True)])
    mean = torch.stack([row[where.bool()].mean(0) for row, where in zip(expected, mask, strict=True)])
    near(ours(ids, attention_mask=mask, pooling="last").embeddings, last)
    near(ours(ids, attention_mask=mask, pooling="mean").embeddings, mean)


def test_files_come_back_byte_for_byte(theirs, tmp_path):
    _, folder = theirs
    ours = liger_models.from_hub(folder, device="cpu")
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    before, after = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path))
    assert before == after


@pytest.mark.parametrize("family", ["qwen3", "modernbert-decoder"])
def test_a_language_models_head_can_be_left_out(family, tmp_path):
    """Also one of several layers."""
    torch.manual_seed(0)
    whole = liger_models.from_config(config_of(family), device="cpu")
    randomise(whole)
    whole.save_pretrained(tmp_path / "whole")
    ours = liger_models.from_hub(tmp_path / "whole", device="cpu", head=False)
    ids, _ = padded(ours.spec.vocab_size, "right")
    expected = whole(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(ours(ids).last_hidden_state, expected)
    ours.save_pretrained(tmp_path / "ours")
    theirs, report = transformers.AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert theirs.config.architectures == [MODELS[family]]
    near(theirs(ids).last_hidden_state, expected)
    assert type(liger_models.from_hub(tmp_path / "ours", device="cpu")) is LigerBaseModel
    assert type(liger_models.from_config(tmp_path / "ours", device="cpu")) is LigerBaseModel


def test_a_classifier_takes_its_body_from_a_base_model(theirs, tmp_path):
    _, folder = theirs
    ours = liger_models.from_hub(folder, device="cpu", labels=16).eval()
    ours.save_pretrained(tmp_path)
    other, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    ids, _ = padded(ours.spec.vocab_size, "right")
    near(ours(ids[:1]).logits, other.eval()(ids[:1]).logits)


@pytest.mark.parametrize("family", list_architectures())
def test_a_base_models_class_has_its_name_in_transformers(family):
    if family not in MODELS:
        pytest.skip("this transformers does not have it")
    assert as_base(find_architecture(family)).reference == MODELS[family]


def test_a_sequence_without_tokens_has_a_zero_embedding():
    hidden, bounds = torch.randn(5, 3), torch.tensor([0, 2, 2, 5])
    for pooling, rows in (
        ("last", hidden[[1, 4]]),
        ("mean", torch.stack([hidden[:2].mean(0), hidden[2:].mean(0)])),
    ):
        found = pooled(hidden, bounds, pooling)
        near(found[[0, 2]], rows)
        assert not found[1].any()


def test_what_a_base_model_lacks_is_refused(theirs):
    _, folder = theirs
    ours = liger_models.from_hub(folder, device="cpu")
    with pytest.raises(UnsupportedModelError, match="no head"):
        ours.generate(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="expected 'last' or 'mean'"):
        ours(torch.zeros(1, 2, dtype=torch.long), pooling="cls")
    with pytest.raises(ConfigError, match="mtp predicts tokens"):
        liger_models.from_hub(folder, head=False, mtp=True)
