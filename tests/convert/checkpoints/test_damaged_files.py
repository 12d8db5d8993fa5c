"""A damaged checkpoint folder is refused before any byte of it is used."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from sample_files import entry, random_tensors, write_raw, write_sharded

from liger_models.convert.checkpoints.reading import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
)
from liger_models.convert.errors import CheckpointError

# ------------------------------------------------------------------------------------- damaged headers


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F32", [2], 0, 8)}, b"1234567", "truncated: tensor 'a' ends at byte"),
        ({"a": entry("F32", [2], 0, 8)}, b"123456789", "1 bytes after its last tensor, 'a'"),
        ({"a": entry("F32", [2], 0, 4)}, b"1234", r"'a' of shape \(2,\) and dtype F32 needs 8 bytes"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"0" * 12, "'b'.*overlaps 'a'"),
        (
            {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)},
            b"0" * 16,
            "'b'.*leaves a gap after 'a'",
        ),
        ({"a": entry("F32", [1], 4, 8)}, b"0" * 8, "'a'.*leaves a gap after the header"),
        ({"a": entry("F4", [2], 0, 1)}, b"0", "tensor 'a' has dtype 'F4'"),
        ({"a": entry(["F32"], [2], 0, 8)}, b"0" * 8, "tensor 'a' has dtype"),
        ({"a": entry("F32", [-2], 0, 8)}, b"0" * 8, "tensor 'a' has the shape"),
        ({"a": entry("F32", [True], 0, 4)}, b"0" * 4, "tensor 'a' has the shape"),
        ({"a": entry("F32", [2.0], 0, 8)}, b"0" * 8, "tensor 'a' has the shape"),
        ({"a": entry("F32", [2], 8, 0)}, b"0" * 8, "tensor 'a' has the data_offsets"),
        ({"a": entry("F32", [2], -8, 0)}, b"0" * 8, "tensor 'a' has the data_offsets"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}},
            b"0" * 8,
            "'a' has the data_offsets",
        ),
        ({"a": entry("F32", [2**40, 2**40], 0, 8)}, b"0" * 8, "'a' has the shape .*fewer than 2\\^63 bytes"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"0" * 8, "entry for 'a' must hold"),
        ({"a": 3}, b"", "entry for 'a' must hold"),
        ({"__metadata__": {"x": 1}}, b"", "__metadata__"),
        (b'{"a":', b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"\xff\xfe{}", b"", "not valid JSON"),
        (b"[1]", b"", "must be a JSON object"),
        (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "names 'a' twice"),
    ],
)
def test_a_damaged_header_raises_one_error_that_names_file_and_tensor(tmp_path, header, data, message):
    write_raw(tmp_path / SINGLE_FILE, header, data)
    with pytest.raises(CheckpointError, match=rf"(?s){tmp_path}/{SINGLE_FILE}: .*{message}"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(("length", "data"), [(2**63, b""), (3, b""), (200_000_000, b""), (None, b"")])
def test_a_header_longer_than_its_file_is_an_error(tmp_path, length, data):
    if length is None:
        (tmp_path / SINGLE_FILE).write_bytes(b"12345")
    else:
        write_raw(tmp_path / SINGLE_FILE, b"{}", data, length)
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: .*(header claims|too short)"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("cut", [1, 9, 100, 700])
def test_a_real_file_cut_short_anywhere_is_an_error(tmp_path, cut):
    save_file(random_tensors(), tmp_path / SINGLE_FILE)
    os.truncate(tmp_path / SINGLE_FILE, (tmp_path / SINGLE_FILE).stat().st_size - cut)
    with pytest.raises(CheckpointError, match=f"{SINGLE_FILE}: is truncated"):
        CheckpointReader(tmp_path)


# ---------------------------------------------------------------------------------- folders and indexes


def change_index(folder, change):
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        "",
        3,
        "x.bin",
    ],
)
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, name):
    write_sharded(tmp_path / "in", random_tensors())
    save_file(random_tensors(), tmp_path / "evil.safetensors")
    change_index(tmp_path / "in", lambda placed: placed.update({"q.weight": name}))
    with pytest.raises(
        CheckpointError, match=rf"{INDEX_FILE}: places tensor 'q.weight' in .*expected the plain name"
    ):
        CheckpointReader(tmp_path / "in")


def test_a_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: cannot be opened"):
        CheckpointReader(tmp_path)


def test_a_tensor_that_is_only_in_the_index_is_named(tmp_path):
    index = write_sharded(tmp_path, random_tensors())
    file = index["weight_map"]["q.weight"]
    change_index(tmp_path, lambda placed: placed.update({"ghost": file}))
    with pytest.raises(CheckpointError, match=f"places tensor 'ghost' in {file}, which does not hold it"):
        CheckpointReader(tmp_path)


def test_a_tensor_in_another_file_than_the_index_says_is_named(tmp_path):
    index = write_sharded(tmp_path, random_tensors())
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"]["q.weight"])
    change_index(tmp_path, lambda placed: placed.update({"q.weight": other}))
    with pytest.raises(CheckpointError, match=f"places tensor 'q.weight' in {other}, which does not hold it"):
        CheckpointReader(tmp_path)


def test_a_tensor_that_is_only_in_a_file_is_named(tmp_path):
    index = write_sharded(tmp_path, random_tensors())
    file = index["weight_map"]["q.weight"]
    change_index(tmp_path, lambda placed: placed.pop("q.weight"))
    with pytest.raises(
        CheckpointError, match=f"{file}: holds tensor 'q.weight', which {INDEX_FILE} does not list"
    ):
        CheckpointReader(tmp_path)


def test_a_tensor_that_is_in_two_files_is_named(tmp_path):
    index = write_sharded(tmp_path, random_tensors())
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"]["q.weight"])
    tensors = {n: t for n, t in random_tensors().items() if index["weight_map"][n] == other}
    save_file({**tensors, "q.weight": torch.zeros(8, 6)}, tmp_path / other)
    with pytest.raises(CheckpointError, match=r"holds tensor 'q.weight', which model-.* holds too"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path / INDEX_FILE)):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "only as pickles .*save_pretrained"),
        (["consolidated.00.pth"], "only as pickles"),
        (["a.safetensors", "b.safetensors"], f"2 safetensors files .* but no {INDEX_FILE}"),
        (["config.json"], "holds no safetensors file"),
        (None, "is not a folder"),
    ],
)
def test_the_error_for_a_folder_without_a_checkpoint_lists_its_contents(tmp_path, files, message):
    folder = tmp_path / "in"
    if files is not None:
        folder.mkdir()
        for file in files:
            (folder / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{folder}: .*{message}"):
        CheckpointReader(folder)
