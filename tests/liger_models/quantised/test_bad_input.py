"""Quantised checkpoints that are damaged, incomplete or unknown: an error that names the tensor."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from published import CASES, FP8, MXFP4, QWEN, blocks
from quantised_files import QuantisedCheckpoint, float8_blocks, tiny

import liger_models
from liger_models.convert.errors import CheckpointError, ConfigError, LigerModelsError, UnsupportedModelError


@pytest.fixture(scope="module")
def of_each_format(tmp_path_factory):
    made: dict[str, QuantisedCheckpoint] = {}

    def get(name: str) -> QuantisedCheckpoint:
        if name not in made:
            made[name] = CASES[name](tmp_path_factory.mktemp("quantised") / "checkpoint")
        return made[name]

    return get


@pytest.fixture
def float8(of_each_format) -> QuantisedCheckpoint:
    return of_each_format("float8 blocks")


@pytest.fixture
def gpt_oss(of_each_format) -> QuantisedCheckpoint:
    return of_each_format("mxfp4")


def load(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return liger_models.from_hub(folder, device="cpu")


UP = "model.layers.0.mlp.up_proj.weight"


def parts(checkpoint: QuantisedCheckpoint) -> list[str]:
    """The names of all parts of one weight, its codes among them."""
    first = checkpoint.quantised[-1]
    stem = first.removesuffix("weight")
    of_weight = (first, f"{stem}weight_", f"{stem}SCB")
    optional = f"{stem}weight_format"
    return [name for name in checkpoint.tensors if name.startswith(of_weight) and name != optional]


@pytest.mark.parametrize("format", CASES)
def test_no_part_of_a_weight_may_be_missing(of_each_format, format):
    checkpoint = of_each_format(format)
    assert len(parts(checkpoint)) > 1
    for name in parts(checkpoint):
        with pytest.raises(CheckpointError) as error:
            load(checkpoint.write(without=name))
        stem = checkpoint.quantised[-1].removesuffix(".weight")
        assert stem in str(error.value), name


@pytest.mark.parametrize("format", CASES)
def test_a_part_of_another_shape_is_refused_by_name(of_each_format, format):
    checkpoint = of_each_format(format)
    stem = re.escape(checkpoint.quantised[-1].removesuffix(".weight"))
    for name in parts(checkpoint):
        longer = torch.cat([checkpoint.tensors[name].view(-1)] * 3)
        with pytest.raises(LigerModelsError, match=stem):
            load(checkpoint.write(**{name: longer}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1e-3])
def test_a_scale_that_is_not_finite_and_positive_is_refused(float8, value):
    scale = float8.tensors[f"{UP}_scale_inv"].clone()
    scale[1, 1] = value
    with pytest.raises(CheckpointError, match=f"{UP}_scale_inv.*{re.escape(str(value))[:3]}"):
        load(float8.write(**{f"{UP}_scale_inv": scale}))


def test_an_exponent_of_255_is_no_scale(gpt_oss):
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scale = gpt_oss.tensors[name].clone()
    scale[-1, -1, -1] = 255
    with pytest.raises(CheckpointError, match=f"{name}.*nan"):
        load(gpt_oss.write(**{name: scale}))


def test_a_transposed_grid_is_refused(float8):
    scale = float8.tensors[f"{UP}_scale_inv"]
    assert scale.shape == (3, 2)
    with pytest.raises(CheckpointError, match=rf"{UP}_scale_inv.*\(2, 3\), expected .*\(3, 2\)"):
        load(float8.write(**{f"{UP}_scale_inv": scale.t()}))


def test_a_scale_does_not_broadcast(float8):
    with pytest.raises(CheckpointError, match=rf"{UP}_scale_inv.*of shape \(1,\)"):
        load(float8.write(**{f"{UP}_scale_inv": torch.ones(1)}))


def test_a_scale_of_a_dense_weight_is_left_over(float8):
    with pytest.raises(CheckpointError, match=f"{UP}_scale_inv' belongs to no weight that is quantised"):
        load(float8.write(**{UP: float8.expected(torch.bfloat16)[UP]}))


def test_two_scales_of_one_weight_are_refused(float8):
    with pytest.raises(CheckpointError, match=f"both '{UP}_scale_inv' and '{UP}_scale'"):
        load(float8.write(**{f"{UP}_scale": float8.tensors[f"{UP}_scale_inv"]}))


def test_a_further_scale_of_nothing_is_left_over(float8):
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight_scale_inv' belongs to no weight"):
        load(float8.write(**{"model.norm.weight_scale_inv": torch.ones(1, 1)}))


def test_float8_without_a_config_is_refused(float8):
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn.*config\.json has no quantization_config"):
        load(float8.write(settings=None))


def test_float8_of_another_kind_is_refused(float8):
    other = float8.tensors[UP].float().to(torch.float8_e5m2)
    with pytest.raises(CheckpointError, match=f"{UP}' is float8_e5m2.*expected float8_e4m3fn"):
        load(float8.write(**{UP: other}))


def test_a_dense_checkpoint_whose_config_says_that_it_is_quantised_is_read_with_a_warning(tmp_path):
    checkpoint = QuantisedCheckpoint.make(tmp_path, QWEN, {}, blocks(128, 128))
    with pytest.warns(UserWarning, match=r"quantised \(fp8\), but all of them are dense"):
        model = liger_models.from_hub(checkpoint.folder, device="cpu")
    for name, tensor in model.checkpoint_tensors():
        assert torch.equal(tensor, checkpoint.dense[name])


def test_scales_of_activations_are_ignored_and_that_is_said_once(of_each_format):
    checkpoint = of_each_format("float8, one scale a matrix")
    with pytest.warns(UserWarning, match=r"7 scales of activations") as record:
        liger_models.from_hub(checkpoint.write(), device="cpu")
    assert len(record) == 1


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_an_excluded_module_that_is_quantised_is_refused(float8, key):
    settings = blocks(32, 24, **{key: ["lm_head", UP.removesuffix(".weight")]})
    with pytest.raises(CheckpointError, match=f"{UP}' is quantised .*excludes it"):
        load(float8.write(settings=settings))


def test_the_name_of_another_module_excludes_nothing(float8):
    load(float8.write(settings=blocks(32, 24, modules_to_not_convert=["up", "mlp", "gate", "lm_head"])))


@pytest.mark.parametrize(
    "settings",
    [
        blocks(32, 0),
        blocks(32),
        {**FP8, "weight_block_size": 128},
        blocks(32, 24, fmt="e5m2"),
        blocks(32, 24, scale_fmt="log2"),
        blocks(32, 24, activation_scheme="sometimes"),
        blocks(32, 24, expert_dtype="fp2"),
        blocks(32, 24, modules_to_not_convert="lm_head"),
        "fp8",
    ],
)
def test_a_setting_that_is_not_known_is_refused(float8, settings):
    with pytest.raises(ConfigError, match="quantization_config"):
        load(float8.write(settings=settings))


METHODS = ["gptq", "awq", "quark", "aqlm", "hqq", "torchao", "auto-round"]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_is_not_read_is_refused_with_where_the_original_is(float8, method):
    with pytest.raises(UnsupportedModelError, match=f"quantised with {method}.*Use the original bfloat16"):
        load(float8.write(settings={"quant_method": method, "bits": 4}))


@pytest.mark.parametrize("settings", [{"quant_method": "fp9"}, {"bits": 4}, {"quant_method": ["fp8"]}])
def test_an_unknown_method_is_refused(float8, settings):
    with pytest.raises(UnsupportedModelError, match=r"quantised with .*is not known here; supported are"):
        load(float8.write(settings=settings))


def test_blocks_that_transformers_saved_dense_are_explained(gpt_oss):
    dense = gpt_oss.expected(torch.bfloat16)
    renamed = {f"{name}_blocks": dense[name] for name in gpt_oss.quantised}
    scales = [name for name in gpt_oss.tensors if name.endswith("_scales")]
    without = QuantisedCheckpoint(gpt_oss.folder, gpt_oss.config, dict(gpt_oss.tensors), {})
    for name in scales:
        del without.tensors[name]
    for settings in (None, MXFP4):
        with pytest.raises(CheckpointError, match=r"down_proj_blocks.*bfloat16.*transformers"):
            load(without.write(settings=settings, **renamed))


def test_a_weight_in_two_forms_is_refused(gpt_oss):
    name = gpt_oss.quantised[0]
    with pytest.raises(
        CheckpointError, match=f"{name}_blocks' holds the weight '{name}', which .*another form"
    ):
        load(gpt_oss.write(**{name: gpt_oss.dense[name]}))


def test_tensors_of_further_predictions_are_checked_and_exported_dense(tmp_path):
    config = tiny("deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1)
    checkpoint = QuantisedCheckpoint.make(tmp_path / "in", config, float8_blocks((16, 16)), blocks(16, 16))
    parts, values = float8_blocks((16, 16))((48, 32))
    name = "model.layers.2.mlp.up_proj.weight"
    further = {f"{name}{ending}": part for ending, part in parts.items()}
    model = load(checkpoint.write(**further))
    assert torch.equal(dict(model.checkpoint_tensors())[name], values.bfloat16())
    del further[f"{name}_scale_inv"]
    with pytest.raises(
        CheckpointError, match=re.escape(f"'{name}_scale_inv' or '{name}_scale' is not in the checkpoint")
    ):
        load(checkpoint.write(**further))
