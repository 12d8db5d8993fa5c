"""Reading copies exactly the bytes of a checkpoint, with little extra memory."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from sample_files import MAP, random_tensors, write_sharded

from liger_models.convert.checkpoints.expressions import Cat, Ref, Rows
from liger_models.convert.checkpoints.reading import (
    SINGLE_FILE,
    CheckpointReader,
    load_parameters,
)
from liger_models.convert.checkpoints.round_trip import verify_roundtrip
from liger_models.convert.errors import CheckpointError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]


def native(weight_map, tensors):
    return {name: expr.read(tensors.__getitem__) for name, expr in weight_map.items()}


def round_trip(reader, weight_map, dtype=torch.float32):
    """Verify the round trip through native tensors of this dtype."""
    return verify_roundtrip(reader, weight_map, dict.fromkeys(weight_map, dtype))


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", [0, 3])
def test_every_parameter_is_loaded_bit_for_bit(tmp_path, dtype, shards):
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
def test_another_dtype_is_converted_as_torch_does(tmp_path, stored, wanted):
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


def test_single_rows_can_be_read(tmp_path):
    tensors = random_tensors()
    save_file(tensors, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader:
        for expr in MAP.values():
            whole = expr.read(tensors.__getitem__)
            if whole.dim():
                rows = torch.empty_like(whole[1:3])
                Rows(expr, min(1, len(whole)), min(3, len(whole))).read_into(rows, reader.read_into)
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


def test_verify_finds_a_tensor_that_does_not_round_trip(tmp_path, monkeypatch):
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


def test_a_parameter_fused_from_several_dtypes_is_verified_in_each(tmp_path):
    tensors = {"a": torch.randn(4).bfloat16(), "b": torch.randn(4), "c": torch.randn(4).half()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader:
        weight_map = {"w": Cat([Ref(n, (4,)) for n in tensors])}
        assert round_trip(reader, weight_map, torch.float32).changed == ()
        assert round_trip(reader, weight_map, torch.bfloat16).changed == ("b", "c")


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
def test_loading_half_a_gigabyte_needs_little_more_than_the_parameters(tmp_path):
    """Peak resident memory is the parameters plus at most 150 MB, although each fuses two tensors."""
    rows, columns, layers = 4096, 8192, 8  # 8 x 2 x 32 MB = 0.54 GB in bfloat16
    script = f"""
        import resource, torch
        from liger_models.convert.checkpoints.reading import CheckpointReader, load_parameters
        from liger_models.convert.checkpoints.source_layout import match_layout
        from liger_models.convert.checkpoints.expressions import Cat, Ref
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
    assert int(out[0]) == rows * columns * 2 * layers > 5e8
    assert int(out[1]) < 150e6
    assert float(out[2]) == 3.5
