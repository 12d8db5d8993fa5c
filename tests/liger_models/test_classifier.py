"""Sequence classifiers: the numbers and the files of transformers' classes."""

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.cli import main
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.models.classifier import LigerSequenceClassifier

transformers = pytest.importorskip("transformers")
PAD = 3


def config_of(family, **changes):
    tiny = {key: value for key, value in find_architecture(family).tiny.items() if value is not ...}
    return {**tiny, "pad_token_id": PAD, **changes}


def randomised(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def padded(vocab_size):
    """Rows of 9, 5 and 1 tokens, none of which is padding within."""
    ids = torch.randint(PAD + 1, vocab_size, (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5], [1]])
    return ids.masked_fill(~mask, PAD), mask.long()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_rewards_and_files_match_transformers(family, tmp_path):
    torch.manual_seed(0)
    causal = randomised(liger_models.from_config(config_of(family), device="cpu"))
    causal.save_pretrained(tmp_path / "causal")
    ours = randomised(liger_models.from_hub(tmp_path / "causal", labels=2, device="cpu"))
    assert isinstance(ours, LigerSequenceClassifier)
    ours.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(theirs).__name__ == ours.architecture.reference
    ids, mask = padded(ours.spec.vocab_size)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        found = ours(ids, attention_mask=mask).logits
        again = liger_models.from_hub(tmp_path / "ours", device="cpu").eval()(ids, attention_mask=mask).logits
        rows = [ids[i, :n] for i, n in enumerate(mask.sum(1))]
        bounds = torch.tensor([0, 9, 14, 15], dtype=torch.int32)
        packed = ours(torch.cat(rows)[None], cu_seqlens=bounds).logits
        states = theirs.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        values = theirs.score(states) * mask[..., None]
        of_tokens = ours(ids, attention_mask=mask, every_token=True).logits
        in_one_row = ours(torch.cat(rows)[None], cu_seqlens=bounds, every_token=True).logits
        unmasked = ours(ids).logits  # the padding token says where a sequence ends
    assert torch.equal(found, again)
    # As everywhere in float32: 1e-5 of the largest.
    for other in (found, packed, unmasked):
        assert (other - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (of_tokens - values).abs().max() <= 1e-5 * values.abs().max()
    assert (in_one_row[0] - values[mask.bool()]).abs().max() <= 1e-5 * values.abs().max()
    theirs.save_pretrained(tmp_path / "theirs")
    back = liger_models.from_hub(tmp_path / "theirs", device="cpu")
    back.save_pretrained(tmp_path / "back")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("theirs", "back"))
    assert a == b


def test_the_body_is_the_language_model_s_and_the_head_is_fresh(tmp_path):
    causal = randomised(liger_models.from_config(config_of("llama"), device="cpu", dtype="bfloat16"))
    causal.save_pretrained(tmp_path)
    torch.manual_seed(5)
    one = liger_models.from_hub(tmp_path, labels=1, device="cpu")
    torch.manual_seed(5)
    other = liger_models.from_hub(tmp_path, labels=1, device="cpu")
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.lm_head.weight.shape == (1, causal.spec.hidden_size)
    assert one.lm_head.weight.dtype == torch.bfloat16
    assert 0 < one.lm_head.weight.float().std() < 3 * causal.spec.initializer_range
    expected = causal.state_dict()
    for name, tensor in one.state_dict().items():
        if not name.startswith("lm_head."):
            assert torch.equal(tensor, expected[name]), name


def test_calls_without_labels_or_tokens_are_refused(tmp_path, capsys):
    model = liger_models.from_config(config_of("llama"), labels=2, device="cpu")
    with pytest.raises(UnsupportedModelError, match="it has no distribution of tokens"):
        model.generate(torch.tensor([[4]]))
    model.save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "every byte the same" in told
    assert "not compared with transformers: only language models are compared" in told
    with pytest.raises(ConfigError, match="labels is 1; expected 2"):
        liger_models.from_hub(tmp_path, labels=1, device="cpu")
    with pytest.raises(UnsupportedModelError, match="expected a text-only family"):
        liger_models.from_config(find_architecture("gemma3").tiny, labels=1, device="meta")
