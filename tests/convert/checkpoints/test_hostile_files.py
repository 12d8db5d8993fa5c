"""Hostile files each raise one clear error within a second and 200 MB, before any model is built."""

import json
import os
import socket

import pytest
import torch
from safetensors.torch import save_file
from sample_files import entry, write_raw

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.hub import resolve
from liger_models.convert.checkpoints.reading import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    load_parameters,
)
from liger_models.convert.checkpoints.safetensors_header import build_header
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import CheckpointError, ConfigError

GOOD = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


# ------------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_header_or_an_index_that_is_not_plain_utf8_is_refused(tmp_path, encoding):
    """Other readers refuse them; one that guessed the encoding would write files that no other can read."""
    write_raw(tmp_path / SINGLE_FILE, GOOD.encode(encoding), b"01234567")
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: its header is not valid JSON"):
        CheckpointReader(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_bytes('{"weight_map":{"a":"x.safetensors"}}'.encode(encoding))
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: is not valid JSON"):
        CheckpointReader(tmp_path)


def test_a_duplicate_name_among_60000_is_found_at_once(within_a_second, tmp_path):
    names = [f"model.layers.{i}.weight" for i in range(60_000)] + ["model.layers.59999.weight"]
    entries = ",".join(f'"{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in names)
    write_raw(tmp_path / SINGLE_FILE, f"{{{entries}}}".encode())
    with (
        within_a_second(),
        pytest.raises(CheckpointError, match=r"header names 'model.layers.59999.weight' twice"),
    ):
        CheckpointReader(tmp_path)


def test_a_duplicate_name_in_the_index_is_found(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_text('{"weight_map":{"a":"y.safetensors","a":"x.safetensors"}}')
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: names 'a' twice"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("filler", [b"[" + b"{}," * 29_700_000 + b"{}]", b" " * 89_000_000])
def test_a_header_of_89_megabytes_is_not_even_read(within_a_second, tmp_path, filler):
    write_raw(tmp_path / SINGLE_FILE, filler)
    with (
        within_a_second(),
        pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: its header claims 89\d+ bytes"),
    ):
        CheckpointReader(tmp_path)


def test_an_index_of_89_megabytes_is_not_even_read(within_a_second, tmp_path):
    (tmp_path / INDEX_FILE).write_bytes(b"[" + b"{}," * 29_700_000 + b"{}]")
    with within_a_second(), pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: is 89\d+ bytes long"):
        CheckpointReader(tmp_path)


def test_a_header_that_could_not_be_read_again_is_not_written(monkeypatch):
    monkeypatch.setattr("liger_models.convert.checkpoints.safetensors_header.MAX_HEADER_BYTES", 1000)
    assert len(build_header([("a", torch.float32, (1,))], {})) < 1000
    with pytest.raises(CheckpointError, match=r"a file of 30 tensors .* smaller max_shard_size"):
        build_header([(f"layers.{i}", torch.float32, (1,)) for i in range(30)], {})


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ([2**62, 4], 2**66),
        ([2**63], 2**65),
        ([2**62, 0], 0),
        ([2**70, 0], 0),
        ([10**400], 8),
        ([10**400] * 30, 8),
        ([10**400, 0], 0),
        ([2**40, 2**40], 2**82),
    ],
)
def test_sizes_that_no_tensor_can_have_are_refused(tmp_path, shape, nbytes):
    header = json.dumps({"a": entry("F32", shape, 0, nbytes)}).encode()
    write_raw(tmp_path / SINGLE_FILE, header, b"01234567"[:nbytes])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: tensor 'a' .*shape") as error:
        CheckpointReader(tmp_path)
    assert len(str(error.value)) < 500


def test_offsets_of_400_digits_and_more_are_refused(tmp_path):
    for offsets in ([10**400, 10**400 + 8], [0, 10**400], [0, 2**64 + 8]):
        write_raw(
            tmp_path / SINGLE_FILE, json.dumps({"a": entry("F32", [2], *offsets)}).encode(), b"01234567"
        )
        with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: .*'a'") as error:
            CheckpointReader(tmp_path)
        assert len(str(error.value)) < 500
    digits = b"9" * 5000  # beyond Python's own limit for integers
    write_raw(tmp_path / SINGLE_FILE, GOOD.encode().replace(b"8", digits), b"01234567")
    with pytest.raises(CheckpointError, match=f"{SINGLE_FILE}: its header is not valid JSON"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("part", ["name", "metadata"])
def test_text_that_cannot_be_written_again_is_refused(tmp_path, part):
    half = r"\ud800"
    header = (
        GOOD.replace('"a"', f'"{half}"')
        if part == "name"
        else GOOD[:-1] + f',"__metadata__":{{"x":"{half}"}}}}'
    )
    write_raw(tmp_path / SINGLE_FILE, header.encode(), b"01234567")
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: .*surrogate"):
        CheckpointReader(tmp_path)


# ----------------------------------------------------------------------------------------- not files at all


@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE, "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device", "a socket"])
def test_pipes_and_devices_are_refused_without_blocking(within_a_second, tmp_path, monkeypatch, name, kind):
    path = tmp_path / name
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(tmp_path)  # the path of a socket is limited to 108 bytes
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    if name.startswith("model-"):
        index = {"weight_map": {"a": name}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    refusal = rf"{path}: cannot be opened \(it is {kind}, expected a file\)"
    with within_a_second(), pytest.raises(CheckpointError, match=refusal):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("special", ["/dev/zero", "pipe"])
def test_a_config_that_is_not_a_regular_file_is_refused_without_blocking(within_a_second, tmp_path, special):
    path = tmp_path / "config.json"
    if special == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(special)
    with within_a_second(), pytest.raises(ConfigError, match=f"{path}: .*expected"):
        HFConfig.load(path)
    with within_a_second(), pytest.raises(CheckpointError, match=f"{tmp_path}: has no config.json"):
        resolve(tmp_path)


# ---------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_integers_and_float8_are_refused_as_weights(tmp_path, dtype):
    """A quantised weight without its scale, or bfloat16 declared as int16, would load as noise."""
    save_file({"a": torch.ones(2), "b": torch.ones(2).to(dtype)}, tmp_path / SINGLE_FILE)
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2)}
    weights = {"a": Ref("a", (2,)), "b": Ref("b", (2,))}
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: tensor 'b' is in {dtype}, but weights"):
            load_parameters(parameters, weights, reader)
        load_parameters({**parameters, "b": torch.zeros(2, dtype=dtype)}, weights, reader)  # fine for buffers
