"""Broken chat templates, tokenizer files and paths raise one error that names the file, and the line."""

import json
import os
import shutil

import pytest

import liger_models
from liger_models.convert.checkpoints.hub import belongs_to, resolve
from liger_models.convert.errors import CheckpointError, DataError, LigerModelsError
from liger_models.training.data import load_documents
from liger_models.training.text.tokenizer import TextTokenizer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    return shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")


@pytest.fixture
def load(folder, tmp_path, jsonl):
    """Function that loads conversations with a chat template."""

    def make(messages, template=None):
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        file = jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}, {"messages": messages}])
        return load_documents([file], TextTokenizer(folder), seq_len=64, vocab_size=320)

    return make


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no') }}", "TemplateError"),
        ("{{ 1 // (messages | length - 2) }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[0].content.strip(3) }}", "TypeError"),
        ("{{ 'x'.encode('no-such') }}", "LookupError"),
        ("{{ '%d' | format('x') }}", "TypeError"),
        ("{{ 'x'.center(-1, 'ab') }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(999999999) | list }}", "OverflowError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ strftime_now('%') | int + messages }}", "TypeError"),
        ("{{ messages | tojson(indent='x', nothing=1) }}", "TypeError"),
    ],
)
def test_whatever_a_chat_template_raises_the_error_names_file_and_line(load, template, error):
    with pytest.raises(DataError, match=rf"talk\.jsonl, line 1: the chat template of .*rejects.*{error}"):
        load(TALK, template)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 1 // 0 }}", "{{ 'a' * 10 ** 10 ** 10 }}", "{% include 'x' %}"]
)
def test_an_invalid_template_is_a_clear_error(load, template):
    with pytest.raises(DataError, match="chat template of"):
        load(TALK, template)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 3},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": ["x"]},
        {"chat_template": [{"name": "default", "template": 3}]},
        {"chat_template": {"a": 1}},
        {"eos_token": 3},
        {"eos_token": {"content": [1]}},
        [],
    ],
)
def test_a_tokenizer_config_of_a_wrong_form_is_a_clear_error(load, folder, config):
    whole = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole | config if config else config))
    with pytest.raises(DataError, match=str(folder)):
        load(TALK)


def test_a_template_that_is_not_utf8_is_a_clear_error(load, folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=f"chat template of {folder} cannot be read"):
        load(TALK)


@pytest.mark.parametrize("content", [None, 3, {"text": "ho"}, True])
@pytest.mark.parametrize("place", [0, 1])
def test_content_that_is_not_text_names_file_and_line(load, content, place):
    """A null would be rendered as the word "None"."""
    messages = [dict(message) for message in TALK]
    messages[place]["content"] = content
    with pytest.raises(DataError, match=rf"talk\.jsonl, line 2: the content of message {place} "):
        load(messages)


def test_a_role_that_is_not_text_names_file_and_line(load):
    with pytest.raises(DataError, match=r"talk\.jsonl, line 2: the role of message 0 is \['user'\]"):
        load([{"role": ["user"], "content": "hi"}, TALK[1]])


# ------------------------------------------------------------------------------------------------------ links


def test_links_out_of_the_folder_are_not_copied_into_exports(checkpoint, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a private key")
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("vocab.json", "tokenizer_secret"):
        (folder / name).symlink_to(secret)
    (folder / "merges.txt").symlink_to("tokenizer.json")  # a link within the folder
    model = liger_models.from_hub(folder)
    with pytest.warns(UserWarning, match=r"vocab\.json links out of its folder"):
        model.save_pretrained(tmp_path / "out")
    written = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "merges.txt"} <= written.keys()
    assert not {"vocab.json", "tokenizer_secret"} & written.keys()
    assert not any(path.is_symlink() for path in written.values())


def test_links_out_of_the_folder_are_not_copied_by_training(
    run, settings, tmp_path, tokenizer_folder, checkpoint
):
    tokenizer = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (tmp_path / "secret").write_text("a private key")
    (tokenizer / "merges.txt").symlink_to(tmp_path / "secret")
    model = shutil.copytree(checkpoint, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with pytest.warns(UserWarning, match=r"merges\.txt links out of its folder"):
        result = run(settings(steps=1, model=str(model), tokenizer=str(tokenizer), eval_fraction=0.0))
    assert not (result.final / "merges.txt").exists()
    assert (result.final / "tokenizer.json").exists()


def test_links_within_the_hubs_cache_are_followed(tmp_path):
    """<repository>/snapshots/<commit>/file links to <repository>/blobs/<hash>."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    for folder in (snapshot, tmp_path / "models--a--b" / "blobs", tmp_path / "models--c--d" / "blobs"):
        folder.mkdir(parents=True)
        (folder.parent / "blobs").mkdir(exist_ok=True)
    (tmp_path / "models--a--b" / "blobs" / "f00").write_text("{}")
    (tmp_path / "models--c--d" / "blobs" / "f00").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/f00")
    (snapshot / "vocab.json").symlink_to("../../../models--c--d/blobs/f00")
    assert belongs_to(snapshot / "tokenizer.json", snapshot)
    with pytest.warns(UserWarning, match="links out of its folder"):
        assert not belongs_to(snapshot / "vocab.json", snapshot)


# ------------------------------------------------------------------------------------------------------ paths

NO_PATHS = ["~nosuchuser/model", "./" + "x" * 300, "/" + "x/" * 5000, "./a\0b"]


@pytest.mark.parametrize("name", NO_PATHS, ids=["user", "name", "path", "null"])
def test_paths_that_the_system_refuses_are_clear_errors(run, settings, name, folder, tmp_path):
    with pytest.raises(CheckpointError, match="is not a usable path"):
        resolve(name)
    with pytest.raises(LigerModelsError, match="is not a usable path"):
        liger_models.from_hub(name)
    for option in ("model", "output", "tokenizer", "resume"):
        with pytest.raises(LigerModelsError, match=r"is not a usable path|cannot be a folder"):
            run(settings(**{option: name}))
    with pytest.raises(DataError, match="is not a usable path"):
        load_documents([f"{name}.txt"], TextTokenizer(folder), seq_len=64, vocab_size=320)


def test_data_in_a_pipe_is_refused_without_blocking(folder, tmp_path):
    os.mkfifo(tmp_path / "data.jsonl")
    with pytest.raises(DataError, match=r"data\.jsonl is not a file"):
        load_documents([str(tmp_path / "data.jsonl")], TextTokenizer(folder), seq_len=64, vocab_size=320)
