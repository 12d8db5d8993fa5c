"""Image files that would block, fill memory or leak local files raise clear errors."""

import io
import os
from typing import Any

import pytest
import torch
from drawn import WORDS, asked, png

import liger_models
from liger_models.cli import main
from liger_models.convert.errors import DataError
from liger_models.images import Preprocessor
from liger_models.training.data import load_documents, pictured
from liger_models.training.data.reading import tables
from liger_models.training.text.tokenizer import TextTokenizer

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def load(vision_model, tmp_path_factory):
    """Function that loads the documents of a file for a vision-language model."""
    model, cache = liger_models.from_hub(vision_model, device="cpu"), tmp_path_factory.mktemp("images")

    def make(file):
        images = Preprocessor(vision_model, model.spec)
        options = {"seq_len": 96, "vocab_size": len(WORDS), "cache": cache, "images": images}
        return load_documents([str(file)], TextTokenizer(vision_model), **options)

    return make


@pytest.mark.parametrize("name", ["pipe.png", "/dev/zero", "a\0b.png", "folder"])
def test_only_regular_files_are_read(load, tmp_path, jsonl, name, within_a_second):
    """Reading a pipe would block, and a device never ends."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder").mkdir()
    file = jsonl(tmp_path / "bad.jsonl", [asked({"type": "image", "path": name}, "red")])
    with pytest.raises(
        DataError, match=r"bad\.jsonl, line 1: the image .* cannot be read \((it is a|embedded)"
    ):
        load(file)


def test_an_image_of_144_megapixels_is_refused_and_the_limit_can_be_raised(
    load, vision_model, tmp_path, jsonl, monkeypatch, within_a_second, capsys
):
    from PIL import Image

    Image.new("1", (12_000, 12_000)).save(tmp_path / "large.png")
    file = jsonl(tmp_path / "a.jsonl", [asked({"type": "image", "path": "large.png"}, "red")])
    limit = Image.MAX_IMAGE_PIXELS
    too_large = (
        r"line 1: the image .*large\.png is too large: 12,000 times 12,000 pixels, more than 89,478,485"
    )
    warned = pytest.warns(Image.DecompressionBombWarning)
    with pytest.raises(DataError, match=too_large), warned, within_a_second():
        load(file)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000_000)  # Pillow refuses more than twice the limit
    with pytest.raises(DataError, match="is too large: more than twice 50,000,000 pixels"):
        load(file)
    (tmp_path / "small.png").write_bytes(png("red", (64, 64)))
    small = jsonl(tmp_path / "b.jsonl", [asked({"type": "image", "path": "small.png"}, "red")])
    command = [
        "tokenize",
        str(vision_model),
        "--data",
        small,
        "--seq-len",
        "600",
        "--output",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.warns(Image.DecompressionBombWarning):
        assert main([*command, "--max-image-pixels", "4095"]) == 2
    assert "is too large: 64 times 64 pixels, more than 4,095" in capsys.readouterr().err
    assert main([*command, "--max-image-pixels", "4096"]) == 0


def test_workers_use_the_limit_of_their_run(monkeypatch):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    limit = pictured.most_pixels()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    monkeypatch.setattr(pictured, "_own", [])
    threads = torch.get_num_threads()
    pictured._begin("images", limit)
    torch.set_num_threads(threads)
    assert (Image.MAX_IMAGE_PIXELS, pictured._own) == (7, ["images"])


@pytest.mark.parametrize("given", ["{file}", "a.png", "../a.png", "{url}", "~/a.png", "zip://a::{file}"])
@pytest.mark.parametrize("form", ["feature", "undecoded", "text", "frames"])
def test_rows_of_a_data_set_of_the_hub_cannot_name_local_files(load, tmp_path, monkeypatch, given, form):
    """datasets itself would open the local file that an image's path names."""
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "a.png"
    file.write_bytes(png("green", (24, 16)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = given.format(file=file, url=file.as_uri())
    talk: list[dict[str, Any]] = [{"role": "user", "content": "<image>what?"}]
    talk.append({"role": "assistant", "content": "green"})
    image: Any = {"bytes": None, "path": given}
    row: dict[str, Any] = {"messages": talk, "images": [given if form == "text" else image]}
    if form == "frames":
        talk[0]["content"] = [{"type": "video", "video": [given, given], "fps": 1.0}]
        talk[1]["content"] = [{"type": "text", "text": "green"}]
        row = {"messages": talk}
    rows = datasets.Dataset.from_list([row])
    if form == "feature":
        rows = rows.cast_column("images", datasets.List(datasets.Image()))
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **options: rows.to_iterable_dataset())
    monkeypatch.setattr(tables, "commit_of", lambda name: "one")
    with pytest.raises(
        DataError, match=r"hf:owner/pictures, row 1: the image .* is a file, but this data set"
    ):
        load("hf:owner/pictures")


def test_files_of_a_data_set_of_the_hub_are_read(load, tmp_path, monkeypatch):
    """Paths as in a data set made from a folder of images; only files within its repository are read."""
    fsspec, opened = pytest.importorskip("fsspec"), []

    def read(path, mode):
        opened.append(path)
        return io.BytesIO(b"image")

    monkeypatch.setattr(fsspec, "open", read)
    own = "hf://datasets/owner/pictures@one/a.png"
    row = {"images": [{"bytes": None, "path": path} for path in (own, f"zip://b.png::{own}", "/a.png")]}
    row["images"].append({"bytes": None, "path": "hf://datasets/owner/pictures2@one/a.png"})
    found = tables._with_bytes("row 1", row, "owner/pictures")["images"]
    assert found[:2] == [{"bytes": b"image", "path": None}] * 2
    assert found[2:] == row["images"][2:]
    assert opened == [own, f"zip://b.png::{own}"]
