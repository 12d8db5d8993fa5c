"""Quantised checkpoints are written: in the format that was read, or in a new one."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from published import CASES, GPT_OSS
from quantised_files import QuantisedCheckpoint, tiny
from safetensors import safe_open
from safetensors.torch import load_file

import liger_models
from liger_models.cli import main
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.convert.quantised.codes import FLOAT4
from liger_models.convert.quantised.encoding import encode
from liger_models.convert.quantised.formats import CODES, SCALE, Blocks


def load(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return liger_models.from_hub(folder, device="cpu", **options)


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("format", CASES)
def test_a_model_that_did_not_change_is_written_with_the_bits_that_were_read(format, tmp_path):
    checkpoint = CASES[format](tmp_path / "in")
    load(checkpoint.folder).save_pretrained(tmp_path / "out", quantization="as_loaded")
    found = tensors(tmp_path / "out")
    assert found.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == checkpoint.config
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as file:
        assert file.metadata() == checkpoint.metadata


# The largest error, as a share of the largest weight of a block: half the distance of the two largest codes,
# which is 32 of 448 and 2 of 6. Rounding exponents up doubles it. With exponents for float4 the largest
# weight may be 8, of which 6 remain. A scale in float8 is off by 1 / 16 at most, as is then the largest
# weight; one in bfloat16 by 1 / 256.
CHANGED = {
    "float8 blocks": 16 / 448,
    "float8 blocks, bfloat16 scales": 16 / 448 + 1 / 256,
    "float8 blocks, float4 experts (DeepSeek-V4)": 2 / 8,
    "float8 blocks, stacked experts": 16 / 448,
    "float8, one scale a matrix": 16 / 448 + 1 / 256,
    "fbgemm": 16 / 448,
    "mxfp4": 2 / 8,
    "nvfp4 of compressed-tensors": 1 / 6 + 1 / 16,
    "nvfp4 of modelopt": 1 / 6 + 1 / 16,
}


@pytest.mark.parametrize("format", CHANGED)
def test_a_weight_that_changed_is_quantised_anew_and_no_other(format, tmp_path):
    checkpoint = CASES[format](tmp_path / "in")
    model = load(checkpoint.folder)
    name = next(name for name in checkpoint.quantised if "down_proj" in name)
    native = next(n for n, e in model.weight_map().items() if name in {ref.name for ref in e.refs()})
    with torch.no_grad():
        model.get_parameter(native).normal_(0, 0.3)
    wanted = dict(model.checkpoint_tensors())
    model.save_pretrained(tmp_path / "out", quantization="as_loaded")
    stored = tensors(tmp_path / "out")
    part_of = [ref.name.removesuffix("weight") for ref in model.weight_map()[native].refs()]
    for other, tensor in checkpoint.tensors.items():
        if not other.startswith(tuple(part_of)):
            assert bits(stored[other]) == bits(tensor), other
    found = dict(load(tmp_path / "out", dtype=torch.float32).checkpoint_tensors())
    error = (found[name] - wanted[name].float()).abs().max()
    assert 0 < error <= CHANGED[format] * 1.01 * wanted[name].float().abs().max()
    assert not torch.equal(found[name], checkpoint.dense[name])


def test_changed_integers_are_not_written(tmp_path):
    model = load(CASES["int4, one scale a row"](tmp_path / "in").folder)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.add_(1)
    with pytest.raises(UnsupportedModelError, match=r"int4, one scale a row.*write them dense"):
        model.save_pretrained(tmp_path / "out", quantization="as_loaded")
    assert not (tmp_path / "out").exists()


def test_codes_of_float4_are_the_nearest_ones_and_even_between_two():
    values = torch.cat(
        [torch.arange(-64, 65) / 10, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0])]
    )
    values = torch.cat([values, torch.tensor([6.0] * (160 - len(values)))]).view(5, 32)
    for row in values:
        row[-1] = 6.0  # so that the scale is 1
    parts = encode(Blocks(FLOAT4, (1, 32)), values, torch.uint8)
    assert parts[SCALE].unique().tolist() == [127]
    halves = torch.stack((parts[CODES] & 15, parts[CODES] >> 4), -1).flatten(1).int()
    for value, code in zip(values.flatten().tolist(), halves.flatten().tolist(), strict=True):
        magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        distance = [abs(abs(value) - magnitude) for magnitude in magnitudes]
        best = [i for i in range(8) if distance[i] <= min(distance) + 1e-7]
        assert code % 8 == (best[0] if len(best) == 1 else next(i for i in best if i % 2 == 0)), value
        assert (code >= 8) == (math.copysign(1, value) < 0), value


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense checkpoint with matrices that blocks of 128 x 128 divide, and others."""
    config = tiny(
        "llama", num_hidden_layers=1, hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=131
    )
    return QuantisedCheckpoint.make(tmp_path_factory.mktemp("dense"), config, {}, None).folder


@pytest.mark.parametrize("kind", ["fp8-block", "nvfp4"])
def test_a_dense_model_is_exported_in_a_format_that_transformers_reads(dense, kind, tmp_path):
    assert main(["export", str(dense), str(tmp_path / "out"), "--quantization", kind]) == 0
    found, exact = (dict(load(folder).checkpoint_tensors()) for folder in (tmp_path / "out", dense))
    assert found.keys() == exact.keys()
    changed = {name for name in found if not torch.equal(found[name], exact[name])}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    excluded = settings.get("modules_to_not_convert", settings.get("ignore"))
    linear = {name for name in found if "_proj.weight" in name}
    assert changed == linear - {f"{module}.weight" for module in excluded}
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"} <= changed
    for name in changed:
        error = (found[name] - exact[name]).float().abs().max() / exact[name].float().abs().max()
        assert error < (0.04 if kind == "fp8-block" else 0.23)
    transformers = pytest.importorskip("transformers")
    if kind == "nvfp4":
        pytest.importorskip("compressed_tensors")
        asked = transformers.CompressedTensorsConfig(run_compressed=False)
    else:
        asked = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=asked, dtype=torch.bfloat16
    ).state_dict()
    for name, tensor in found.items():
        assert torch.equal(theirs[name], tensor), name


def test_gpt_oss_is_exported_in_mxfp4_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    dense = QuantisedCheckpoint.make(tmp_path / "in", GPT_OSS, {}, None).folder
    model = load(dense)
    model.save_pretrained(tmp_path / "out", quantization="mxfp4")
    model.save_pretrained(tmp_path / "bfloat16")
    found = load(tmp_path / "out")
    found.save_pretrained(tmp_path / "decoded")
    read = transformers.GptOssForCausalLM.from_pretrained
    theirs = read(
        tmp_path / "out", quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).state_dict()
    decoded = read(tmp_path / "decoded").state_dict()
    exact = read(tmp_path / "bfloat16").state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(decoded[name], tensor), name
        assert torch.equal(exact[name], tensor) != name.endswith(
            ("experts.gate_up_proj", "experts.down_proj")
        )


@pytest.mark.parametrize(
    ("family", "quantization", "error", "named"),
    [
        ("llama", "int2", ConfigError, "'int2'; expected 'as_loaded', 'fp8-block', 'nvfp4', 'mxfp4' or None"),
        ("llama", "as_loaded", CheckpointError, "not loaded from its own checkpoint"),
        ("llama", "mxfp4", UnsupportedModelError, "only of gpt-oss"),
        ("gpt_oss", "fp8-block", UnsupportedModelError, "in one tensor.*or mxfp4"),
        ("llama", "fp8-block", UnsupportedModelError, "no matrix of its layers"),
    ],
)
def test_a_format_that_no_server_reads_is_refused(family, quantization, error, named, tmp_path):
    model = liger_models.from_config(tiny(family), device="cpu")
    with pytest.raises(error, match=named):
        model.save_pretrained(tmp_path / "out", quantization=quantization)


def test_a_dense_checkpoint_has_no_format_to_keep(dense, tmp_path):
    with pytest.raises(CheckpointError, match="its weights are not quantised"):
        load(dense).save_pretrained(tmp_path / "out", quantization="as_loaded")
