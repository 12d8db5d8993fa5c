"""Special tokens are read from tokenizer folders, old and new, as by transformers."""

import json
import shutil

import pytest

import liger_models
from liger_models.cli import main
from liger_models.convert.errors import DataError
from liger_models.training.text.tokenizer import TextTokenizer

USER = "<|user|>"
CASES = {
    "no map": ({"eos_token": "</s>"}, None),
    "a map goes before the config": ({"eos_token": "</s>"}, {"eos_token": USER}),
    "a map of objects": ({"eos_token": "</s>"}, {"eos_token": {"content": USER, "lstrip": False}}),
    "a null in the map": ({"eos_token": "</s>", "bos_token": "<s>"}, {"bos_token": None}),
    "a map alone": ({}, {"eos_token": USER}),
    "a newer config goes before the map": (
        {"eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "</s>", "special": True}}},
        {"eos_token": USER},
    ),
    "a newer config is all there is": (
        {"added_tokens_decoder": {"1": {"content": "</s>", "special": True}}},
        {"eos_token": USER},
    ),
}


@pytest.mark.parametrize(("config", "special"), CASES.values(), ids=CASES)
def test_special_tokens_match_transformers(tokenizer_folder, tmp_path, config, special):
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    found = TextTokenizer(folder)
    assert (found.bos_id, found.eos_id) == (expected.bos_token_id, expected.eos_token_id)
    named = {"bos_token": "", "eos_token": "", **expected.special_tokens_map}
    assert found._special_tokens() == named


@pytest.mark.parametrize("with_default", [False, True])
def test_named_chat_templates_are_copied_and_chosen_as_by_transformers(
    checkpoint, settings, run, tmp_path, with_default
):
    transformers = pytest.importorskip("transformers")
    model = shutil.copytree(checkpoint, tmp_path / "model")
    templates = model / "additional_chat_templates"
    templates.mkdir()
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (model / "chat_template.jinja").write_text("of the file")
    (templates / "tool_use.jinja").write_text("of tools")
    if with_default:
        (templates / "default.jinja").write_text("of the folder")
    liger_models.from_hub(model).save_pretrained(tmp_path / "saved")
    assert main(["export", str(model), str(tmp_path / "exported")]) == 0
    of_model = run(settings(model=str(model), steps=1, eval_fraction=0.0)).final
    apart = shutil.copytree(checkpoint, tmp_path / "apart")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (apart / name).unlink()
    options = {"tokenizer": str(model), "output": str(tmp_path / "apart run"), "eval_fraction": 0.0}
    of_tokenizer = run(settings(model=str(apart), steps=1, **options)).final
    talk, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
    for folder in (model, tmp_path / "saved", tmp_path / "exported", of_model, of_tokenizer):
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        found = TextTokenizer(folder)
        for given in (None, tools):
            expected = reference.apply_chat_template(talk, tools=given, tokenize=False)
            assert found._sources["tool_use" if given else "default"] == expected


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_duplicate_key_is_refused(tokenizer_folder, tmp_path, name):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / name).write_text('{"eos_token": "</s>", "eos_token": "<s>"}')
    with pytest.raises(DataError, match=f"{name}: names 'eos_token' twice"):
        TextTokenizer(folder)
