"""`--add-tokens`: new special tokens in the tokenizer, with trained rows in the model."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

import liger_models
from liger_models.cli import main
from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.text.added_tokens import write_with_tokens
from liger_models.training.text.tokenizer import TextTokenizer

TOKENS = ("<|think|>", "</s>", "<|done|>")  # of which the tokenizer has one
NEW = range(320, 322)


@pytest.fixture(scope="module")
def thoughts(tmp_path_factory):
    """Texts with the new tokens."""
    rng, path = random.Random(4), tmp_path_factory.mktemp("thoughts") / "data.jsonl"
    texts = ["<|think|>" + "".join(rng.choices("abc ", k=30)) + "<|done|>" for _ in range(24)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="module")
def untied(tmp_path_factory, checkpoint, tiny_shape):
    """The checkpoint with a head of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    torch.manual_seed(2)
    model = liger_models.from_config({**tiny_shape, "tie_word_embeddings": False}, device="cpu")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_tokens_are_written_to_every_file_that_lists_them(tmp_path, checkpoint):
    transformers = pytest.importorskip("transformers")
    (listed := tmp_path / "listed").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (listed / name).write_bytes((checkpoint / name).read_bytes())
    config = json.loads((listed / "tokenizer_config.json").read_text())
    config |= {
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|user|>"],
    }
    config["added_tokens_decoder"] = {"2": {"content": "<|user|>", "special": True}}
    (listed / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer(listed)
    new = write_with_tokens(tokenizer, TOKENS, tmp_path / "new")
    assert new.folder == tmp_path / "new"
    assert new.vocab_size == 322
    text = "ab<|think|> c</s><|done|>"
    ids = new.encode(text)
    assert [i for i in ids if i >= 320] == [320, 321]
    assert set(NEW) <= new.special_ids
    assert tokenizer.encode("abc d") == new.encode("abc d")
    written = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert written["additional_special_tokens"] == ["<|user|>", "<|think|>", "<|done|>"]
    assert written["added_tokens_decoder"]["321"]["content"] == "<|done|>"
    assert written["chat_template"] == config["chat_template"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs(text)["input_ids"] == ids
    assert "<|think|>" not in theirs.decode(ids, skip_special_tokens=True)
    # Those that are there cost nothing.
    assert write_with_tokens(new, TOKENS, tmp_path / "again") is new
    assert not (tmp_path / "again").exists()
    with pytest.raises(DataError, match="empty token"):
        write_with_tokens(tokenizer, ("<a>", " "), tmp_path / "none")


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_learns_new_tokens_and_exports_them(
    tied, tmp_path, checkpoint, untied, settings, run, thoughts, capsys
):
    model = checkpoint if tied else untied
    options = {"model": str(model), "data": (thoughts,), "add_tokens": TOKENS, "eval_fraction": 0.0}
    config = settings(output=tmp_path / "run", steps=4, save_every=2, keep=0, **options)
    result = run(config)
    assert "added tokens: <|think|> (320), </s> (1), <|done|> (321)" in capsys.readouterr().err
    final = result.final
    before, after = (load_file(folder / "model.safetensors") for folder in (model, final))
    for name in before.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        assert after[name].shape == (322, 32)
        for row in NEW:  # trained, from the mean
            moved = after[name][row] - before[name].mean(0)
            assert 0 < moved.abs().max() < 0.2
    assert json.loads((final / "config.json").read_text())["vocab_size"] == 322
    assert TextTokenizer(final).encode("<|done|>")[-1] == 321
    found = liger_models.from_hub(final, device="cpu").eval()
    ids = torch.tensor([[0, 320, 5, 321]])
    if transformers := pytest.importorskip("transformers"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(final).eval()
        expected = theirs(ids).logits
        assert (found(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    resumed = run(config.changed(output=str(tmp_path / "again"), resume=str(tmp_path / "run/checkpoint-2")))
    for name, tensor in load_file(resumed.final / "model.safetensors").items():
        assert torch.equal(tensor, after[name]), name
    assert (resumed.final / "tokenizer.json").read_bytes() == (final / "tokenizer.json").read_bytes()
    other = config.changed(output=str(tmp_path / "x"), resume=str(tmp_path / "run/checkpoint-2"))
    with pytest.raises(ConfigError, match="was trained with add_tokens"):
        run(other.changed(add_tokens=()))
    capsys.readouterr()
    generate = ["generate", str(final), "--prompt", "<|think|>ab", "--raw", "--max-new-tokens", "2"]
    assert main([*generate, "--device", "cpu"]) == 0
    # Trained again, the tokens are there.
    further = run(settings(output=tmp_path / "further", **options | {"model": str(final)}))
    assert load_file(further.final / "model.safetensors")["model.embed_tokens.weight"].shape == (322, 32)


def test_a_tokenizer_that_has_the_tokens_already_is_compared_with_the_model_s(
    tmp_path, checkpoint, settings, run, thoughts
):
    write_with_tokens(TextTokenizer(checkpoint), TOKENS, tmp_path / "tokenizer")
    options = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "data": (thoughts,),
        "eval_fraction": 0.0,
        "steps": 1,
    }
    with pytest.raises(DataError, match="and the model's vocabulary has 320 entries"):
        run(settings(output=tmp_path / "without", **options))
    result = run(settings(output=tmp_path / "with", add_tokens=TOKENS, **options))
    assert liger_models.from_hub(result.final, device="cpu").spec.vocab_size == 322
    assert TextTokenizer(result.final).encode("<|done|>")[-1] == 321


@pytest.mark.parametrize("tied", [True, False])
def test_rows_below_adapters_are_trained_as_in_the_whole_table(tied, tmp_path, checkpoint, untied):
    """Their gradients equal the gradients of the table's rows, and PEFT's switch disables them."""
    from liger_models.layers.parts.embedding import TrainedRows

    model = liger_models.from_hub(checkpoint if tied else untied, device="cpu")
    ids, labels = torch.tensor([[0, 310, 5, 311, 9]]), torch.tensor([[0, 310, 5, 311, 312]])

    def run():
        model.zero_grad()
        output = model(ids, labels=labels, return_logits=True)
        output.loss.backward()
        return output

    expected, rows = run(), range(310, 313)
    tables = [model.embed_tokens.weight] if tied else [model.embed_tokens.weight, model.lm_head.weight]
    gradients = [table.grad[310:313].clone() for table in tables]
    model.requires_grad_(False)
    model.embed_tokens.trained_rows = TrainedRows(model.embed_tokens.weight, rows)
    model.lm_head.trained_rows = (
        model.embed_tokens.trained_rows if tied else TrainedRows(model.lm_head.weight, rows)
    )
    found = run()
    bound = {"rtol": 1e-5, "atol": 1e-7}  # float32, sums in another order
    torch.testing.assert_close(found.loss, expected.loss, **bound)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    for owner, gradient in zip((model.embed_tokens, model.lm_head), gradients, strict=False):
        torch.testing.assert_close(owner.trained_rows.weight.grad, gradient, **bound)
    with torch.no_grad():
        model.embed_tokens.trained_rows.weight += 1
    assert (model(ids).logits - expected.logits).abs().max() > 0.1
    from liger_models.losses.reference import without_adapters

    with without_adapters(model), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_carry_new_tokens(tied, tmp_path, checkpoint, untied, settings, run, thoughts):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = checkpoint if tied else untied
    options = {"data": (thoughts,), "lora": "r=2", "eval_fraction": 0.0, "lr": 0.03}
    new = {"model": str(model), "add_tokens": TOKENS}
    config = settings(output=tmp_path / "run", steps=4, save_every=2, keep=0, merge=True, **options, **new)
    final = run(config).final
    tensors = load_file(final / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    base = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert tensors[name].shape == (2, 32)
    assert ((tensors[name] - base.mean(0)).abs().amax(1) > 1e-3).all()
    assert (name.replace("model.embed_tokens", "lm_head") in tensors) == (not tied)
    ids = torch.tensor([[0, 320, 5, 321, 7]])
    found = liger_models.from_hub(final, device="cpu").eval()
    assert found.spec.vocab_size == 322
    logits = found(ids).logits
    merged = liger_models.from_hub(tmp_path / "run" / "merged", device="cpu").eval()(ids).logits
    assert (merged - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert TextTokenizer(tmp_path / "run" / "merged").encode("<|done|>")[-1] == 321
    # PEFT on transformers' model: its user resizes the vocabulary.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    theirs.resize_token_embeddings(322, mean_resizing=False)
    expected = peft.PeftModel.from_pretrained(theirs, final).eval()(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    resumed = run(config.changed(output=str(tmp_path / "again"), resume=str(tmp_path / "run/checkpoint-2")))
    for name, tensor in load_file(resumed.final / "adapter_model.safetensors").items():
        assert torch.equal(tensor, tensors[name]), name
    assert main(["merge", str(final), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 322
    further = run(settings(output=tmp_path / "further", **options | {"model": str(final), "lora": None}))
    again = load_file(further.final / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert not torch.equal(again[name], tensors[name])


def test_the_reference_of_new_adapters_has_the_rows_as_they_began(
    tmp_path, checkpoint, settings, run, thoughts
):
    """Before the first step, the reference is the model: the loss of DPO is log 2."""
    pytest.importorskip("peft")
    pairs = [{"prompt": "<|think|>a", "chosen": f"b<|done|>{i}", "rejected": "c"} for i in range(8)]
    (path := tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"objective": "dpo", "data": (str(path),), "eval_fraction": 0.0, "steps": 2}
    result = run(settings(output=tmp_path / "run", lora="r=2", add_tokens=TOKENS, **options))
    assert result.records[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_rows_that_would_stay_frozen_are_refused(tmp_path, settings, run, thoughts):
    options = {"data": (thoughts,), "add_tokens": TOKENS, "eval_fraction": 0.0}
    with pytest.raises(ConfigError, match="adds rows to embed_tokens, which freeze or train_only freezes"):
        run(settings(output=tmp_path / "a", freeze=("embed_tokens",), **options))
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="trains rows of embed_tokens, which is frozen or has an adapter"):
        run(settings(output=tmp_path / "b", lora="r=2", freeze=("embed_tokens",), **options))
