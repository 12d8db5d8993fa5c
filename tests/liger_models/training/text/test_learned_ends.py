"""End tokens that a model has learned are written to generation_config.json wherever it is saved."""

import json
import shutil
import warnings

import pytest
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.cli import main
from liger_models.training.data.corpora.learned_tokens import LearnedTokens
from liger_models.training.text.tokenizer import TextTokenizer

TALKS = [
    {"messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": f"b {i}"}]}
    for i in range(12)
]
NAME = "generation_config.json"


@pytest.fixture
def model(checkpoint, tmp_path):
    """Checkpoint whose end-of-text token (id 2) differs from the template's end of turns, </s> (id 1)."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / NAME).write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "do_sample": True}))
    return folder


@pytest.fixture
def trained(model, settings, run, jsonl, tmp_path):
    def make(records=TALKS, **changes):
        file = jsonl(tmp_path / "data.jsonl", records)
        options = {"model": str(model), "data": (file,), "steps": 2, "eval_fraction": 0.0, "save_every": 1}
        return run(settings(**options | changes))

    return make


def ends_in(folder):
    return json.loads((folder / NAME).read_text())["eos_token_id"]


def test_a_learned_end_of_turn_is_added_to_the_others(trained, model, tmp_path):
    transformers = pytest.importorskip("transformers")
    final = trained().final
    written = json.loads((final / NAME).read_text())
    assert written == {"eos_token_id": [2, 1], "temperature": 0.6, "do_sample": True}
    assert transformers.GenerationConfig.from_pretrained(final).eos_token_id == [2, 1]
    assert liger_models.from_hub(final).special_id("eos_token_id") == [2, 1]
    assert ends_in(final.parent / "checkpoint-2") == [2, 1]
    assert main(["export", str(final), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / NAME).read_bytes() == (final / NAME).read_bytes()
    again = trained(model=str(final), output=str(tmp_path / "again"))  # no token is added twice
    assert (again.final / NAME).read_bytes() == (final / NAME).read_bytes()
    resumed = trained(steps=3, resume="auto")
    assert (resumed.final / NAME).read_bytes() == (final / NAME).read_bytes()


def test_adapters_and_merged_models_list_learned_end_tokens(trained):
    pytest.importorskip("peft")
    final = trained(lora="r=2", merge=True).final
    assert ends_in(final) == [2, 1]
    assert ends_in(final.parent / "merged") == [2, 1]


@pytest.mark.parametrize("lora", [None, "r=2"])
def test_a_model_trained_on_text_keeps_its_end_tokens(trained, model, lora):
    if lora:
        pytest.importorskip("peft")
    final = trained([{"text": "a b c"}] * 12, lora=lora, merge=bool(lora)).final
    merged = final.parent / "merged" if lora else final
    assert (merged / NAME).read_bytes() == (model / NAME).read_bytes()
    assert lora is None or not (final / NAME).exists()


def test_a_missing_generation_config_is_made_from_config_json(trained, model):
    (model / NAME).unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 4], "pad_token_id": 5}))
    written = json.loads((trained().final / NAME).read_text())
    assert written == {"bos_token_id": 0, "pad_token_id": 5, "eos_token_id": [3, 4, 1]}


@pytest.mark.parametrize("tied", [True, False])
def test_learned_tokens_with_frozen_rows_near_zero_raise_a_warning(trained, model, tied, tmp_path):
    """This occurs with chat templates on base models: adapters cannot train a frozen embedding near zero."""
    pytest.importorskip("peft")
    file = model / "model.safetensors"
    tensors = load_file(file)
    if not tied:
        (model / "config.json").write_text(
            json.dumps(json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False})
        )
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][1] *= 1e-6  # </s>, which the answers end with
    user = TextTokenizer(model).backend.token_to_id("<|user|>")
    tensors["model.embed_tokens.weight"][user] *= 1e-6
    save_file(tensors, file, {"format": "pt"})
    rows = "embedding" if tied else "embedding and the head"
    names = r"<\|user\|>" if tied else r"</s>, <\|user\|>"
    expected = rf"the tokens {names}, whose rows of the {rows} are near zero and frozen"
    with pytest.warns(UserWarning, match=expected):
        trained(lora="r=2")
    for number, options in enumerate(({}, {"records": [{"text": "a b"}] * 9, "lora": "r=2"})):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*are near zero and frozen")
            trained(**options, output=str(tmp_path / f"quiet {number}"))


def test_tokens_within_answers_are_not_end_tokens():
    """If a token ends reasoning and an answer follows, generation must continue."""
    learned, special = LearnedTokens(), frozenset({1, 2, 3, 9})
    #              a question      reasoning, its end, a header, the answer, its end, a line break
    learned.note([9, 10, 11, 12, 20, 2, 3, 21, 22, 23, 1, 24], bytes([0] * 4 + [1] * 8), special, True)
    assert learned.ends() == [1]
    #              the end of an earlier answer, not of the last one
    learned.note([10, 20, 3, 10, 20, 1], bytes([0, 1, 1, 0, 1, 1]), special, True)
    learned.note([10, 9], bytes([0, 1]), special, False)
    assert learned.ends() == [1]
    learned |= LearnedTokens(last=[2, 9])
    assert learned.ends() == [1, 9]  # text follows 2
    assert learned.seen == {1, 2, 3, 9}
