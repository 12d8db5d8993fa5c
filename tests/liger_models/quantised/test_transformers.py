"""Quantised checkpoints in transformers: the same bits where its dequantised load is right, our classes in
its
loader, and exports that it reads.
"""

from __future__ import annotations

import pytest
import torch
from published import CASES, GPT_OSS, MXFP4, blocks
from quantised_files import QuantisedCheckpoint, float8_blocks, mxfp4, tiny

import liger_models

transformers = pytest.importorskip("transformers")
import liger_models.hf  # noqa: E402

# Of grids that divide the weights: transformers takes the block to be shape / grid.
EVEN = {
    "float8 blocks": lambda folder: QuantisedCheckpoint.make(
        folder, tiny("qwen3", num_hidden_layers=1), float8_blocks((16, 16)), blocks(16, 16)
    ),
    "float8 blocks, e8m0 scales": lambda folder: QuantisedCheckpoint.make(
        folder,
        tiny("qwen3_moe", num_hidden_layers=1),
        float8_blocks((16, 16), torch.float8_e8m0fnu),
        blocks(16, 16, scale_fmt="ue8m0"),
    ),
    "float8, one scale a matrix": CASES["float8, one scale a matrix"],
    "mxfp8": CASES["mxfp8"],
    "mxfp4": lambda folder: QuantisedCheckpoint.make(folder, GPT_OSS, mxfp4, MXFP4, "*.experts.*_proj"),
    # Its library no longer reads groups of columns in an order of their own.
    **{name: CASES[name] for name in CASES if "of compressed-tensors" in name or name.startswith("int4, a")},
    "int4, groups, experts (Kimi K2)": CASES["int4, groups, experts (Kimi K2)"],
    "int4, one scale a row": CASES["int4, one scale a row"],
}


def dequantised_by_transformers(checkpoint: QuantisedCheckpoint, reference: type):
    match checkpoint.config["quantization_config"]["quant_method"]:
        case "mxfp4":
            asked = transformers.Mxfp4Config(dequantize=True)
        case "compressed-tensors":
            pytest.importorskip("compressed_tensors")
            asked = transformers.CompressedTensorsConfig(run_compressed=False)
        case _:
            asked = transformers.FineGrainedFP8Config(dequantize=True)
    return reference.from_pretrained(checkpoint.folder, quantization_config=asked, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*scales of activations")
@pytest.mark.parametrize("format", EVEN)
def test_values_are_those_of_transformers_dequantised(format, tmp_path):
    checkpoint = EVEN[format](tmp_path / "in")
    model = liger_models.from_hub(checkpoint.folder, device="cpu")
    reference = getattr(transformers, model.architecture.reference)
    theirs = dequantised_by_transformers(checkpoint, reference).state_dict()
    model.save_pretrained(tmp_path / "out")
    of_export = reference.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert of_export.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(of_export[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*scales of activations")
@pytest.mark.parametrize("format", ["float8 blocks", "float8 blocks, experts one by one", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_classes_are_loaded_dense_by_transformers(format, dtype, tmp_path):
    checkpoint = CASES[format](tmp_path / "in")
    liger_models.hf.register()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype)
    finally:
        liger_models.hf.unregister()
    assert type(model).__module__.startswith("liger_models")
    assert getattr(model.config, "quantization_config", None) is None
    expected = checkpoint.expected(dtype)
    found = dict(model.checkpoint_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_our_classes_meet_a_request_to_dequantise(tmp_path):
    checkpoint = CASES["mxfp4"](tmp_path / "in")
    liger_models.hf.register()
    try:
        asked = transformers.Mxfp4Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, quantization_config=asked
        )
    finally:
        liger_models.hf.unregister()
    found = dict(model.checkpoint_tensors())
    for name in checkpoint.quantised:
        assert torch.equal(found[name], checkpoint.expected(torch.bfloat16)[name])


@pytest.mark.parametrize(
    "asked",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
)
def test_values_are_those_of_bitsandbytes(asked, tmp_path):
    pytest.importorskip("bitsandbytes")
    # On a CPU its kernel is wrong for rows that are not whole blocks of 64.
    config = tiny("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    QuantisedCheckpoint.make(tmp_path / "dense", config, {}, None)
    quantised = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "dense",
        quantization_config=transformers.BitsAndBytesConfig(**asked),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    quantised.save_pretrained(tmp_path / "quantised")
    found = dict(liger_models.from_hub(tmp_path / "quantised", device="cpu").checkpoint_tensors())
    theirs = quantised.dequantize(dtype=torch.bfloat16).state_dict()
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
