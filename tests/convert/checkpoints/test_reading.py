"""What a checkpoint folder must be before a byte of it is used, and that reading moves exactly its bytes."""

import json
import os
import struct
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from liger_models.convert.checkpoints.reading import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    load_parameters,
    verify_roundtrip,
)
from liger_models.convert.checkpoints.source_layout import match_layout
from liger_models.convert.checkpoints.weight_map import Cat, Ref, Stack, checkpoint_shapes, permuted
from liger_models.convert.errors import CheckpointError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]

MAP = {
    "norm": Ref("norm.weight", (6,)),
    "qkv": Cat([Ref("q.weight", (8, 6)), Ref("k.weight", (2, 6)), Ref("v.weight", (2, 6))]),
    "experts": Stack([Cat([Ref(f"e{i}.gate", (3, 6)), Ref(f"e{i}.up", (3, 6))]) for i in range(4)]),
    "conv": permuted("conv.weight", (7, 5), "i o -> o i"),
    "empty": Ref("empty", (0, 6)),
    "scalar": Ref("scalar", ()),
}


def random_tensors(weight_map=MAP, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 50).to(dtype)
        for name, shape in checkpoint_shapes(weight_map).items()
    }


def write_sharded(folder, tensors, shards=3):
    """Writes tensors in turn to `shards` files with an index, and returns the index."""
    folder.mkdir(exist_ok=True)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    placed = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if placed[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return index


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def native(weight_map, tensors):
    return {name: expr.read(tensors.__getitem__) for name, expr in weight_map.items()}


def round_trip(reader, weight_map, dtype=torch.float32):
    """Of native tensors of this dtype."""
    return verify_roundtrip(reader, weight_map, dict.fromkeys(weight_map, dtype))


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", [0, 3])
def test_every_parameter_is_loaded_to_the_bit(tmp_path, dtype, shards):
    tensors = random_tensors(dtype=dtype)
    if shards:
        write_sharded(tmp_path, tensors, shards)
    else:
        save_file(tensors, tmp_path / SINGLE_FILE)
    expected = native(MAP, tensors)
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    with CheckpointReader(tmp_path) as reader:
        assert reader.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
        load_parameters(loaded, MAP, reader)
        report = round_trip(reader, MAP, dtype)
    assert (report.tensors, report.changed) == (len(tensors), ())
    assert report.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_pieces_smaller_than_a_tensor_and_than_a_row_give_the_same_bits(tmp_path, monkeypatch):
    tensors = random_tensors()
    save_file(tensors, tmp_path / SINGLE_FILE)
    expected = native(MAP, tensors)
    for piece in (1, 7, 50, 1000):
        monkeypatch.setattr("liger_models.convert.checkpoints.tensor_bytes.PIECE_BYTES", piece)
        for dtype in (torch.float32, torch.float64):
            loaded = {name: torch.empty_like(value, dtype=dtype) for name, value in expected.items()}
            with CheckpointReader(tmp_path) as reader:
                load_parameters(loaded, MAP, reader)
                assert round_trip(reader, MAP).changed == ()
            assert all(torch.equal(loaded[name], expected[name].to(dtype)) for name in expected)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
def test_another_dtype_is_converted_as_torch_converts(tmp_path, stored, wanted):
    tensors = random_tensors(dtype=stored)
    save_file(tensors, tmp_path / SINGLE_FILE)
    expected = native(MAP, tensors)
    loaded = {name: torch.empty_like(value, dtype=wanted) for name, value in expected.items()}
    with CheckpointReader(tmp_path) as reader:
        load_parameters(loaded, MAP, reader)
    assert all(torch.equal(loaded[name], value.to(wanted)) for name, value in expected.items())


def test_parameters_that_require_gradients_are_filled_in_place(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / SINGLE_FILE)
    expected = native(MAP, tensors)
    loaded = {name: torch.nn.Parameter(torch.empty_like(value)) for name, value in expected.items()}
    with CheckpointReader(tmp_path) as reader:
        load_parameters(loaded, MAP, reader)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert all(parameter.requires_grad for parameter in loaded.values())


def test_rows_are_read_alone(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader:
        for expr in MAP.values():
            whole = expr.read(tensors.__getitem__)
            if whole.dim():
                rows = torch.empty_like(whole[1:3])
                expr.read_rows(rows, reader.read_into, min(1, len(whole)), min(3, len(whole)))
                assert torch.equal(rows, whole[1:3])
        with pytest.raises(ValueError, match=r"elements \[0, 3\) of tensor 'norm.weight' of shape \(6,\)"):
            reader.read_into("norm.weight", torch.empty(4), 0, 3)


def test_files_that_are_symlinks_into_a_cache_are_read(tmp_path):
    tensors = random_tensors()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(tensors, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / SINGLE_FILE).symlink_to("../blobs/0123")
    with CheckpointReader(tmp_path / "snapshot") as reader:
        assert torch.equal(reader.read("q.weight"), tensors["q.weight"])


def test_a_single_file_of_any_name_is_found(tmp_path):
    save_file(random_tensors(), tmp_path / "weights.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert reader.tensors.keys() == random_tensors().keys()


def test_the_reader_leaves_no_file_open(tmp_path):
    write_sharded(tmp_path, random_tensors())
    before = len(os.listdir("/proc/self/fd"))
    with CheckpointReader(tmp_path):
        assert len(os.listdir("/proc/self/fd")) == before + 3
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_load_names_a_parameter_that_does_not_fit_its_map(tmp_path):
    save_file(random_tensors(), tmp_path / SINGLE_FILE)
    good = native(MAP, random_tensors())
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(ValueError, match=r"entries without a parameter: \['norm'\]"):
            load_parameters({n: t for n, t in good.items() if n != "norm"}, MAP, reader)
        with pytest.raises(ValueError, match=r"'norm' has shape \(5,\), its weight map \(6,\)"):
            load_parameters({**good, "norm": torch.empty(5)}, MAP, reader)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    save_file(random_tensors(), tmp_path / SINGLE_FILE)
    loaded = native(MAP, random_tensors())
    with CheckpointReader(tmp_path) as reader:
        os.truncate(tmp_path / SINGLE_FILE, reader.tensors["q.weight"].offset + 1)
        with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: ended at byte \d+, inside tensor '"):
            load_parameters(loaded, MAP, reader)


def test_verify_finds_a_tensor_that_does_not_come_back(tmp_path, monkeypatch):
    save_file(random_tensors(), tmp_path / SINGLE_FILE)
    true_write = Cat.write

    def swapped(self, tensor):
        out = true_write(self, tensor)
        if "k.weight" in out:
            out["k.weight"], out["v.weight"] = out["v.weight"], out["k.weight"]
        return out

    monkeypatch.setattr(Cat, "write", swapped)
    with CheckpointReader(tmp_path) as reader:
        assert set(round_trip(reader, MAP).changed) == {"k.weight", "v.weight"}


def test_verify_compares_bits_and_not_values(tmp_path, monkeypatch):
    nan_and_zeros = torch.tensor([0x7FC1, 0x7F, 0, 0], dtype=torch.int16).view(torch.bfloat16)
    weight_map = {"w": Cat([Ref("a", (4,)), Ref("b", (4,))])}
    save_file({"a": nan_and_zeros, "b": nan_and_zeros.clone()}, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader:
        assert round_trip(reader, weight_map, torch.bfloat16).changed == ()
        true_write = Cat.write

        def minus_zero(self, tensor):
            tensor[-1] = -0.0
            return true_write(self, tensor)

        monkeypatch.setattr(Cat, "write", minus_zero)
        assert round_trip(reader, weight_map, torch.bfloat16).changed == ("b",)


def test_a_parameter_fused_from_two_dtypes_comes_back_in_both(tmp_path):
    tensors = {"a": torch.randn(4).bfloat16(), "b": torch.randn(4), "c": torch.randn(4).half()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader:
        weight_map = {"w": Cat([Ref(n, (4,)) for n in tensors])}
        assert round_trip(reader, weight_map, torch.float32).changed == ()
        assert round_trip(reader, weight_map, torch.bfloat16).changed == ("b", "c")


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
        ({"a": entry("F32", [2**40, 2**40], 0, 8)}, b"0" * 8, "'a' has the shape .*below 2\\^63 bytes"),
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
def test_a_damaged_header_is_one_error_that_names_file_and_tensor(tmp_path, header, data, message):
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


def test_a_tensor_that_only_the_index_has_is_named(tmp_path):
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


def test_a_tensor_that_only_a_file_has_is_named(tmp_path):
    index = write_sharded(tmp_path, random_tensors())
    file = index["weight_map"]["q.weight"]
    change_index(tmp_path, lambda placed: placed.pop("q.weight"))
    with pytest.raises(
        CheckpointError, match=f"{file}: holds tensor 'q.weight', which {INDEX_FILE} does not list"
    ):
        CheckpointReader(tmp_path)


def test_a_tensor_that_two_files_have_is_named(tmp_path):
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
def test_a_folder_without_a_checkpoint_says_what_it_holds(tmp_path, files, message):
    folder = tmp_path / "in"
    if files is not None:
        folder.mkdir()
        for file in files:
            (folder / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{folder}: .*{message}"):
        CheckpointReader(folder)


# -------------------------------------------------------------------------------------------- matching

OTHER = {"norm": Ref("model.norm.weight", (6,)), "w": Ref("model.w", (4, 4))}


def match(folder, tensors, layouts=None, **kwargs):
    save_file(tensors, folder / SINGLE_FILE)
    with CheckpointReader(folder) as reader:
        return match_layout(reader, layouts or {"first": MAP, "other": OTHER}, **kwargs)


def test_the_layout_with_exactly_these_names_is_found(tmp_path):
    assert match(tmp_path, random_tensors(MAP)).layout == "first"
    assert match(tmp_path, random_tensors(OTHER)).layout == "other"


def test_names_that_fit_no_layout_are_shown_both_ways(tmp_path):
    tensors = random_tensors()
    tensors["surplus"] = tensors.pop("q.weight")
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError) as error:
        match(tmp_path, tensors)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "the nearest of 2 known layouts" in message
    assert "missing from the checkpoint: 2 tensors: norm.weight, q.weight" in message
    assert "unknown to the model: 1 tensors: surplus" in message


def test_a_long_list_of_names_is_cut(tmp_path):
    with pytest.raises(CheckpointError, match=r"unknown to the model: 30 tensors: x0, .*, \.\.\.\n"):
        match(tmp_path, {**random_tensors(), **{f"x{i}": torch.zeros(1) for i in range(30)}})


def test_a_wrong_shape_is_shown_with_file_and_both_shapes(tmp_path):
    wrong = rf"(?s)q.weight in {SINGLE_FILE} is \(6, 8\), expected \(8, 6\)"
    with pytest.raises(CheckpointError, match=wrong):
        match(tmp_path, {**random_tensors(), "q.weight": torch.zeros(6, 8)})


def test_carried_tensors_are_kept_for_export(tmp_path):
    inv_freq = torch.rand(4)
    tensors = {**random_tensors(), "layers.0.rotary_emb.inv_freq": inv_freq}
    source = match(tmp_path, tensors, carried=("*.rotary_emb.inv_freq",))
    assert source.carried.keys() == {"layers.0.rotary_emb.inv_freq"}
    assert torch.equal(source.carried["layers.0.rotary_emb.inv_freq"], inv_freq)
    with pytest.raises(CheckpointError, match=r"unknown to the model: 1 tensors: layers\.0\.rotary_emb"):
        match(tmp_path, tensors)


def test_a_tied_duplicate_must_equal_its_original_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("liger_models.convert.checkpoints.tensor_bytes.PIECE_BYTES", 64)
    tensors = random_tensors()
    tied = {"lm_head.weight": "q.weight"}
    assert match(tmp_path, tensors, tied_duplicates=tied).tied == {}
    same = {**tensors, "lm_head.weight": tensors["q.weight"].clone()}
    assert match(tmp_path, same, tied_duplicates=tied).tied == tied
    for change in (lambda t: t[-1, -1].add_(1), lambda t: t.neg_(), lambda t: t.resize_(4, 6)):
        different = {**tensors, "lm_head.weight": tensors["q.weight"].clone()}
        change(different["lm_head.weight"])
        with pytest.raises(
            CheckpointError, match=r"ties 'lm_head.weight' to 'q.weight'.*tie_word_embeddings"
        ):
            match(tmp_path, different, tied_duplicates=tied)


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_loading_a_gigabyte_needs_little_more_than_the_parameters(tmp_path):
    """Peak resident memory: the parameters, and at most 150 MB, although every parameter is fused of two
    tensors."""
    rows, columns, layers = 4096, 8192, 16  # 16 x 2 x 32 MB = 1.07 GB in bfloat16
    script = f"""
        import resource, torch
        from liger_models.convert.checkpoints.reading import CheckpointReader, load_parameters
        from liger_models.convert.checkpoints.source_layout import match_layout
        from liger_models.convert.checkpoints.weight_map import Cat, Ref
        half = ({rows} // 2, {columns})
        weights = {{f"w{{i}}": Cat([Ref(f"a{{i}}", half), Ref(f"b{{i}}", half)]) for i in range({layers})}}
        parameters = {{name: torch.empty(expr.shape, dtype=torch.bfloat16) for name, expr in weights.items()}}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with CheckpointReader({str(tmp_path)!r}) as reader:
            match_layout(reader, {{"only": weights}})
            load_parameters(parameters, weights, reader)
        total = sum(p.numel() * p.element_size() for p in parameters.values())
        extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - total
        print(total, extra, float(parameters["w3"][-1, -1]))
    """
    shape = (rows // 2, columns)
    tensors = {
        f"{part}{i}": torch.full(shape, i + (part == "b") / 2).bfloat16()
        for i in range(layers)
        for part in "ab"
    }
    write_sharded(tmp_path, tensors, 2)
    del tensors
    command = [sys.executable, "-c", textwrap.dedent(script)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for path in tmp_path.iterdir():
        path.unlink()
    assert int(out[0]) == rows * columns * 2 * layers > 1e9
    assert int(out[1]) < 150e6
    assert float(out[2]) == 3.5
