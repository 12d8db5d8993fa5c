"""Checkpoints are written back as they were read, and a failed save loses nothing."""

import errno
import json
import math
import os
import random
import resource
import shutil
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sample_files import MAP

from liger_models.convert.checkpoints.expressions import Cat, Permute, Ref, Stack
from liger_models.convert.checkpoints.reading import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    load_parameters,
)
from liger_models.convert.checkpoints.source_layout import match_layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.checkpoints.writing import find_aux_files, save_checkpoint
from liger_models.convert.errors import CheckpointError
from liger_models.convert.sizes import parse_size

CONFIG = {"model_type": "test", "hidden_size": 6}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def random_bits(shape, dtype, generator):
    """Random bits, including NaNs with payloads and denormal numbers."""
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_tensors(dtypes, seed=0, weight_map=MAP):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = checkpoint_shapes(weight_map)
    return {name: random_bits(shape, rng.choice(dtypes), generator) for name, shape in shapes.items()}


def random_parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(expr.shape, generator=generator).to(dtype) for name, expr in MAP.items()}


def write_source(folder, tensors, shards, extra_metadata=False):
    folder.mkdir(exist_ok=True)
    metadata = {"format": "pt", "note": "kept"} if extra_metadata else {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata)
    else:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        placed = {name: files[i * 7 % shards] for i, name in enumerate(tensors)}
        for file in files:
            save_file({n: t for n, t in tensors.items() if placed[n] == file}, folder / file, metadata)
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"made": "by hand"}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=4))


def load(folder, weight_map=MAP, dtype=None, **match_options):
    with CheckpointReader(folder) as reader:
        source = match_layout(reader, {"only": weight_map}, **match_options)
        parameters = {}
        for name, expr in weight_map.items():
            parts = [reader.tensors[ref.name].dtype for ref in expr.refs()]
            parameters[name] = torch.empty(expr.shape, dtype=dtype or parts[0])
        load_parameters(parameters, weight_map, reader)
    return parameters, source


def load_all(folder):
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        out.update(load_file(path))
    return out


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes(bits(a)) == bytes(bits(b))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", [1, 4])
def test_an_untrained_round_trip_gives_the_same_files_byte_for_byte(tmp_path, dtype, shards):
    write_source(tmp_path / "in", random_tensors([dtype]), shards, extra_metadata=True)
    parameters, source = load(tmp_path / "in")
    aux = find_aux_files(tmp_path / "in")
    save_checkpoint(tmp_path / "out", parameters, MAP, source=source, config=CONFIG, aux_files=aux)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "in")


def flipped(part):
    """`part` with its dimensions in the reverse order."""
    return Permute(part, part.shape, range(len(part.shape))[::-1], part.shape[::-1])


@pytest.mark.parametrize("seed", range(12))
def test_random_maps_and_dtypes_round_trip_bit_for_bit_with_any_sharding(tmp_path, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(
        "liger_models.convert.checkpoints.tensor_bytes.PIECE_BYTES", rng.choice([1, 13, 100, 1 << 20])
    )
    weight_map = {}
    for i in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(2, 3)))
        parts = [Ref(f"t{i}.{j}", shape) for j in range(rng.randint(1, 3))]
        kind = rng.choice([Cat, Stack, lambda parts: Cat(parts, dim=1), lambda parts: flipped(Stack(parts))])
        weight_map[f"w{i}"] = kind(parts)
    # One dtype within each fused parameter, so that it is stored exactly; several dtypes in a file.
    tensors = {}
    for expr in weight_map.values():
        tensors.update(random_tensors([rng.choice(DTYPES)], seed, {"w": expr}))
    write_source(tmp_path / "in", tensors, rng.choice([1, 2]))
    parameters, source = load(tmp_path / "in", weight_map)
    size = rng.choice([None, 1, 100, "1KB"])
    save_checkpoint(
        tmp_path / "out", parameters, weight_map, source=source, max_shard_size=size, config=CONFIG
    )
    again = load_all(tmp_path / "out")
    assert again.keys() == tensors.keys()
    assert all(same_bits(again[name], tensors[name]) for name in tensors)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.tensors.keys() == tensors.keys()


def test_each_tensor_is_written_in_its_source_dtype(tmp_path):
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in checkpoint_shapes(MAP).items()}
    tensors["norm.weight"] = tensors["norm.weight"].float()
    write_source(tmp_path / "in", tensors, 2)
    parameters, source = load(tmp_path / "in", dtype=torch.float32)
    save_checkpoint(tmp_path / "out", parameters, MAP, source=source, config=CONFIG)
    again = load_all(tmp_path / "out")
    assert all(same_bits(again[name], tensors[name]) for name in tensors)


def test_the_index_follows_a_requested_dtype(tmp_path):
    write_source(tmp_path / "in", random_tensors([torch.float32]), 2)
    parameters, source = load(tmp_path / "in")
    save_checkpoint(tmp_path / "out", parameters, MAP, source=source, dtype=torch.float16, config=CONFIG)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(2 * p.numel() for p in parameters.values())
    assert index["weight_map"] == json.loads((tmp_path / "in" / INDEX_FILE).read_text())["weight_map"]


def test_trained_parameters_are_written_in_the_source_layout(tmp_path):
    write_source(tmp_path / "in", random_tensors([torch.float32]), 3)
    parameters, source = load(tmp_path / "in")
    for parameter in parameters.values():
        parameter.normal_()
    save_checkpoint(tmp_path / "out", parameters, MAP, source=source, config=CONFIG)
    again, _ = load(tmp_path / "out")
    assert all(same_bits(again[name], parameters[name]) for name in parameters)
    for path in (tmp_path / "in").glob("model-*"):
        with safe_open(path, "pt") as a, safe_open(tmp_path / "out" / path.name, "pt") as b:
            assert a.keys() == b.keys()


def test_carried_and_tied_tensors_are_written_again(tmp_path):
    tensors = random_tensors([torch.bfloat16])
    tensors["layer.inv_freq"] = torch.rand(4)
    tensors["lm_head.weight"] = tensors["q.weight"].clone()
    write_source(tmp_path / "in", tensors, 2)
    parameters, source = load(
        tmp_path / "in", carried=("*.inv_freq",), tied_duplicates={"lm_head.weight": "q.weight"}
    )
    parameters["qkv"].normal_()
    for size, dtype in ((None, None), ("1KB", None), (None, torch.float16)):
        save_checkpoint(
            tmp_path / "out", parameters, MAP, source=source, max_shard_size=size, dtype=dtype, config=CONFIG
        )
        again = load_all(tmp_path / "out")
        assert again.keys() == tensors.keys()
        assert same_bits(again["layer.inv_freq"], tensors["layer.inv_freq"])
        assert same_bits(again["lm_head.weight"], parameters["qkv"][:8].to(dtype or torch.bfloat16))
        assert same_bits(again["q.weight"], again["lm_head.weight"])


def test_a_weight_map_of_another_layout_than_the_source_is_refused(tmp_path):
    write_source(tmp_path / "in", random_tensors([torch.float32]), 1)
    _, source = load(tmp_path / "in")
    other = {"norm": Ref("norm.weight", (6,))}
    with pytest.raises(ValueError, match=r"not that of the source's layout.*conv\.weight"):
        save_checkpoint(tmp_path / "out", {"norm": torch.ones(6)}, other, source=source, config=CONFIG)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------- checkpoints made from nothing


def test_a_checkpoint_that_fits_one_file_has_no_index(tmp_path):
    save_checkpoint(tmp_path / "out", random_parameters(), MAP, config=CONFIG)
    assert sorted(files_of(tmp_path / "out")) == ["config.json", SINGLE_FILE]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    with safe_open(tmp_path / "out" / SINGLE_FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path):
    parameters = random_parameters()
    save_checkpoint(tmp_path / "out", parameters, MAP, max_shard_size=200, config=CONFIG)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    elements = sum(parameter.numel() for parameter in parameters.values())
    assert index["metadata"] == {"total_parameters": elements, "total_size": 4 * elements}
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert tensors.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert len(tensors) == 1 or sum(4 * t.numel() for t in tensors.values()) <= 200


@pytest.mark.parametrize("length", range(1, 9))
def test_every_tensor_is_aligned_to_its_dtype(tmp_path, length):
    kinds = [torch.bfloat16, torch.float64, torch.int8, torch.float32, torch.bool, torch.float16]
    parameters = {f"w{i}" * length: torch.ones(3, dtype=dtype) for i, dtype in enumerate(kinds)}
    weight_map = {name: Ref(name, (3,)) for name in parameters}
    save_checkpoint(tmp_path / "out", parameters, weight_map, config=CONFIG)
    with CheckpointReader(tmp_path / "out") as reader:
        assert all(info.offset % info.dtype.itemsize == 0 for info in reader.tensors.values())
    assert load_file(tmp_path / "out" / SINGLE_FILE).keys() == weight_map.keys()


def test_parameters_that_are_strided_or_require_gradients_are_written(tmp_path):
    parameters = random_parameters()
    expected = {name: tensor.clone() for name, tensor in parameters.items()}
    parameters["qkv"] = torch.nn.Parameter(parameters["qkv"].t().contiguous().t())
    save_checkpoint(tmp_path / "out", parameters, MAP, config=CONFIG)
    again, _ = load(tmp_path / "out")
    assert all(same_bits(again[name], expected[name]) for name in expected)


@pytest.mark.gpu
def test_parameters_on_a_gpu_are_filled_and_written_through_pinned_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("liger_models.convert.checkpoints.tensor_bytes.PIECE_BYTES", 100)
    tensors = random_tensors([torch.bfloat16])
    write_source(tmp_path / "in", tensors, 2)
    with CheckpointReader(tmp_path / "in") as reader:
        source = match_layout(reader, {"only": MAP})
        parameters = {
            name: torch.empty(expr.shape, dtype=torch.bfloat16, device="cuda") for name, expr in MAP.items()
        }
        load_parameters(parameters, MAP, reader)
    for name, expr in MAP.items():
        assert same_bits(parameters[name].cpu(), expr.read(tensors.__getitem__))
    aux = find_aux_files(tmp_path / "in")
    save_checkpoint(tmp_path / "out", parameters, MAP, source=source, config=CONFIG, aux_files=aux)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "in")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_requested_dtype_is_written(tmp_path, dtype):
    parameters = random_parameters()
    save_checkpoint(tmp_path / "out", parameters, MAP, dtype=dtype, config=CONFIG)
    again, _ = load(tmp_path / "out")
    assert all(same_bits(again[name], tensor.to(dtype)) for name, tensor in parameters.items())


@pytest.mark.parametrize(
    ("size", "expected"),
    [("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("1.5 MB", 1_500_000), ("2kib", 2048), (77, 77), ("300", 300)],
)
def test_human_readable_sizes_are_parsed(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["5 apples", "", "GB", "-1GB", 0, "0GB", -5, "5 G i B"])
def test_invalid_sizes_are_refused(size, tmp_path):
    with pytest.raises(ValueError, match="a size must be"):
        save_checkpoint(tmp_path / "out", random_parameters(), MAP, max_shard_size=size, config=CONFIG)


# ------------------------------------------------------------------------------------ the other files


def test_files_next_to_the_weights_are_copied(tmp_path):
    carried = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "added_tokens.json",
        "spiece.model",
    ]
    carried += ["additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"]
    carried += ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    carried += ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    left = [
        "README.md",
        "LICENSE",
        "2_Dense/pytorch_model.bin",
        "8bit/config.json",
        "pytorch_model.bin",
        SINGLE_FILE,
        "training_args.bin",
    ]
    left += ["additional_chat_templates/notes.txt", "onnx/config.json"]
    folder = tmp_path / "in"
    for path in ("additional_chat_templates", "onnx", "1_Pooling", "2_Dense", "8bit"):
        (folder / path).mkdir(parents=True)
    for name in carried + left:
        (folder / name).write_bytes(name.encode())
    assert find_aux_files(folder).keys() == set(carried)


def test_chat_templates_by_name_are_written_into_their_folder(tmp_path):
    name = "additional_chat_templates/tool_use.jinja"
    for text in (b"one", b"two"):
        save_checkpoint(
            tmp_path / "out", random_parameters(), MAP, config=CONFIG, aux_files={name: text, "a.txt": b""}
        )
        assert (tmp_path / "out" / name).read_bytes() == text
    for name in (
        "other/tool_use.jinja",
        "additional_chat_templates/../a.jinja",
        "additional_chat_templates/",
    ):
        with pytest.raises(ValueError, match="plain file names"):
            save_checkpoint(tmp_path / "out", random_parameters(), MAP, config=CONFIG, aux_files={name: b""})


def test_config_json_keeps_its_bytes_unless_the_config_changed(tmp_path):
    as_found = json.dumps(CONFIG, indent=7).encode()
    for config, expected in ((CONFIG, True), ({**CONFIG, "dtype": "float16"}, False)):
        aux = {"config.json": as_found, "vocab.json": b"{}"}
        save_checkpoint(tmp_path / "out", random_parameters(), MAP, config=config, aux_files=aux)
        written = (tmp_path / "out" / "config.json").read_bytes()
        assert (written == as_found) == expected
        assert json.loads(written) == config
        assert (tmp_path / "out" / "vocab.json").read_bytes() == b"{}"


def test_a_new_save_replaces_all_old_weights_and_keeps_other_files(tmp_path):
    out = tmp_path / "out"
    save_checkpoint(out, random_parameters(seed=1), MAP, max_shard_size=200, config=CONFIG)
    (out / "README.md").write_text("mine")
    (out / "logs").mkdir()
    (out / "logs" / "a").write_text("mine too")
    save_checkpoint(out, random_parameters(seed=2), MAP, config=CONFIG)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "logs", SINGLE_FILE]
    assert (out / "logs" / "a").read_text() == "mine too"


def test_a_model_can_be_saved_over_the_checkpoint_that_it_came_from(tmp_path):
    write_source(tmp_path / "in", random_tensors([torch.float32]), 2)
    before = files_of(tmp_path / "in")
    parameters, source = load(tmp_path / "in")
    aux = find_aux_files(tmp_path / "in")
    save_checkpoint(tmp_path / "in", parameters, MAP, source=source, config=CONFIG, aux_files=aux)
    assert files_of(tmp_path / "in") == before


@pytest.mark.parametrize("name", ["../config.json", "a/b", "..", ""])
def test_an_aux_file_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match="plain file names"):
        save_checkpoint(tmp_path / "out", random_parameters(), MAP, config=CONFIG, aux_files={name: b"x"})
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------- failure


@pytest.fixture
def old(tmp_path):
    """Checkpoint that a failing save must not change, which is checked afterwards."""
    save_checkpoint(tmp_path / "out", random_parameters(seed=1), MAP, max_shard_size=200, config=CONFIG)
    before = files_of(tmp_path / "out")
    yield tmp_path / "out"
    assert files_of(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("failing_call", [1, 2, 5])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_leaves_the_old_checkpoint(old, monkeypatch, failing_call, code):
    true_write, calls = os.pwrite, []

    def write(fd, data, offset):
        calls.append(fd)
        if len(calls) >= failing_call:
            raise OSError(code, os.strerror(code))
        return true_write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    message = rf"{old}: could not write model\S*\.safetensors \({os.strerror(code)}\)"
    with pytest.raises(CheckpointError, match=message) as error:
        save_checkpoint(old, random_parameters(seed=2), MAP, config=CONFIG)
    assert "untouched" in str(error.value)
    assert ("free space" in str(error.value)) == (code != errno.EIO)


def test_partial_writes_are_continued(tmp_path, monkeypatch):
    true_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: true_write(fd, data[:5], offset))
    save_checkpoint(tmp_path / "out", random_parameters(), MAP, config=CONFIG)
    again, _ = load(tmp_path / "out")
    assert all(same_bits(again[name], value) for name, value in random_parameters().items())


def test_a_real_limit_on_file_size_leaves_the_old_checkpoint(old):
    """In a child, since the limit applies to a process; the kernel's EFBIG simulates a full disk."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        try:
            save_checkpoint(old, random_parameters(seed=2), MAP, config=CONFIG)
        except CheckpointError as error:
            os._exit(7 if "free space" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_too_little_free_space_is_reported_before_a_byte_is_written(old, monkeypatch):
    usage = shutil.disk_usage(old)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes, but only 100 are free"):
        save_checkpoint(old, random_parameters(seed=2), MAP, config=CONFIG)


def test_remains_of_a_killed_save_do_not_count_against_free_space(tmp_path, monkeypatch):
    left = tmp_path / ".out.tmp-0123456789ab"
    left.mkdir()
    usage = shutil.disk_usage(tmp_path)
    free = {True: 100, False: 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[left.exists()]))
    save_checkpoint(tmp_path / "out", random_parameters(seed=2), MAP, config=CONFIG)
    assert not left.exists()


def test_a_missing_aux_file_leaves_the_old_checkpoint(old, tmp_path):
    aux = {"tokenizer.json": tmp_path / "gone"}
    with pytest.raises(CheckpointError, match="No such file"):
        save_checkpoint(old, random_parameters(seed=2), MAP, config=CONFIG, aux_files=aux)


def test_misshapen_parameters_leave_the_old_checkpoint(old):
    with pytest.raises(ValueError, match=r"'norm' has shape \(5,\)"):
        save_checkpoint(old, {**random_parameters(), "norm": torch.ones(5)}, MAP, config=CONFIG)


@pytest.mark.parametrize("kill_at", [1, 2, 3, 6, 9])
def test_a_kill_while_writing_leaves_the_old_checkpoint_and_the_next_save_cleans_up(tmp_path, kill_at):
    out = tmp_path / "out"
    save_checkpoint(out, random_parameters(seed=1), MAP, config=CONFIG)
    before = files_of(out)
    child = os.fork()
    if child == 0:
        true_write, calls = os.pwrite, []

        def write(fd, data, offset):
            calls.append(fd)
            if len(calls) == kill_at:
                true_write(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return true_write(fd, data, offset)

        os.pwrite = write
        save_checkpoint(out, random_parameters(seed=2), MAP, max_shard_size=200, config=CONFIG)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert files_of(out) == before
    assert len(os.listdir(tmp_path)) == 2  # with the half-written folder, under a hidden name
    save_checkpoint(out, random_parameters(seed=2), MAP, config=CONFIG)
    assert os.listdir(tmp_path) == ["out"]
    again, _ = load(out)
    assert all(same_bits(again[name], value) for name, value in random_parameters(seed=2).items())
