"""Each format of quantised weights is read as its formula says, bit for bit."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from published import CASES
from quantised_files import QuantisedCheckpoint
from safetensors.torch import load_file
from torch import Tensor

import liger_models
from liger_models.convert.quantised.reader import ModelReader
from liger_models.models.verification import verify_bytes


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory) -> QuantisedCheckpoint:
    return CASES[request.param](tmp_path_factory.mktemp("quantised") / "checkpoint")


def loaded(checkpoint: QuantisedCheckpoint, **options) -> dict[str, Tensor]:
    """The tensors of a checkpoint's model, under the names of a dense one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scales of activations are ignored
        model = liger_models.from_hub(checkpoint.folder, **{"device": "cpu", **options})
    return dict(model.checkpoint_tensors())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16])
def test_a_weight_is_the_float32_product_rounded_once(checkpoint, dtype):
    assert checkpoint.quantised
    found = loaded(checkpoint, dtype=dtype)
    assert_same(found, checkpoint.expected(torch.bfloat16 if dtype == "auto" else dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_decodes_the_same_bits(checkpoint, dtype):
    found = loaded(checkpoint, dtype=dtype, device="cuda")
    assert all(tensor.is_cuda for tensor in found.values())
    assert_same({name: tensor.cpu() for name, tensor in found.items()}, checkpoint.expected(dtype))


def test_any_range_of_elements_is_read_alone(checkpoint):
    generator = torch.Generator().manual_seed(0)
    with ModelReader(checkpoint.folder) as reader:
        for name in checkpoint.quantised[:2]:
            count = reader.tensors[name].nbytes // 2
            whole = torch.empty(count)
            reader.read_into(name, whole)
            for start in torch.randint(0, count - 1, (5,), generator=generator).tolist():
                stop = int(torch.randint(start + 1, count + 1, (), generator=generator))
                part = torch.empty(stop - start)
                reader.read_into(name, part, start, stop)
                assert torch.equal(part, whole[start:stop])


def test_an_export_is_that_of_the_dense_checkpoint(checkpoint, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        liger_models.from_hub(checkpoint.folder, device="cpu").save_pretrained(tmp_path / "out")
        assert not verify_bytes(checkpoint.folder).changed
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), checkpoint.expected(torch.bfloat16))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    again = liger_models.from_hub(tmp_path / "out", device="cpu")
    assert_same(dict(again.checkpoint_tensors()), checkpoint.expected(torch.bfloat16))


def test_a_matrix_in_float32_does_not_widen_a_quantised_model(tmp_path):
    checkpoint = CASES["float8 blocks, experts one by one"](tmp_path)
    name = "model.layers.0.mlp.gate.weight"
    wide = checkpoint.dense[name].float() + 1e-5
    model = liger_models.from_hub(checkpoint.write(**{name: wide}), device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(dict(model.checkpoint_tensors())[name], wide.bfloat16())
