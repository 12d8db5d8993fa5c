"""Quantised checkpoints that are damaged, incomplete or unknown: an error that names the tensor."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from published import CASES, FP8, MXFP4, QWEN, blocks, int4_settings, modelopt
from quantised_files import QuantisedCheckpoint, float8_blocks, float8_of, nvfp4, tiny

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
    of_weight = (first, f"{stem}weight_", f"{stem}_weight_", f"{stem}SCB", f"{stem}scale")
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


METHODS = ["gptq", "awq", "quark", "aqlm", "hqq", "auto-round"]


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
    with pytest.raises(CheckpointError, match=re.escape(f"'{name}_scale_inv' or '{name}_scale' or ")):
        load(checkpoint.write(**further))


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("nvfp4 of compressed-tensors", "weight_global_scale"),
        ("nvfp4 of modelopt", "weight_scale_2"),
        ("int4, asymmetric", "weight_scale"),
        ("int8 of bitsandbytes", "SCB"),
        ("nf4", "weight.absmax"),
        ("nf4, nested", "weight.nested_absmax"),
        ("float8 of modelopt", "weight_scale"),
        ("fbgemm", "weight_scale"),
        ("int8 of torchao, groups", "_weight_scale"),
    ],
)
def test_every_kind_of_scale_is_finite(of_each_format, format, part):
    checkpoint = of_each_format(format)
    name = next(name for name in checkpoint.tensors if name.endswith(f".{part}"))
    stem = name.removesuffix(part)
    damaged = torch.full_like(checkpoint.tensors[name], float("nan"))
    with pytest.raises(CheckpointError, match=re.escape(stem)):
        load(checkpoint.write(**{name: damaged}))


def test_the_shape_of_packed_integers_is_checked(of_each_format):
    checkpoint = of_each_format("int4, asymmetric")
    for shape in ([84, 47], [83, 48], [48, 84], [0, 0]):
        with pytest.raises(CheckpointError, match=UP):
            load(checkpoint.write(**{f"{UP}_shape": torch.tensor(shape)}))


def test_columns_belong_to_groups_that_exist(of_each_format):
    checkpoint = of_each_format("int4, ordered columns")
    groups = checkpoint.tensors[f"{UP}_g_idx"].clone()
    groups[5] = 3
    with pytest.raises(CheckpointError, match=f"{UP}_g_idx' holds the numbers 0 to 3, but .* 3 groups"):
        load(checkpoint.write(**{f"{UP}_g_idx": groups}))


def test_a_zero_point_of_symmetric_integers_is_refused(of_each_format):
    checkpoint = of_each_format("int4, asymmetric")
    settings = int4_settings(strategy="group", group_size=4)
    with pytest.raises(CheckpointError, match=r"weight_zero_point' is a zero point, but .*symmetrically"):
        load(checkpoint.write(settings=settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config.*rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"format": "marlin-24"}, "format = 'marlin-24'"),
        ({"quantization_status": "thawed"}, "quantization_status"),
        ({"config_groups": []}, "config_groups"),
        ({"config_groups": {"g": {"targets": True, "weights": {}}}}, "no group of config_groups"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": [4]}}}}, "num_bits"),
        ({"ignore": True}, "ignore = True, expected a list"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}}, "num_bits = 3"),
        (
            {"config_groups": {"g": {"targets": ["re:.*experts.*"], "weights": {}}}},
            "no group of config_groups",
        ),
        ({"ignore": ["re:.*mlp.*"]}, r"excludes it from quantisation \('re:\.\*mlp"),
        ({"quantization_status": "frozen"}, "belongs to no weight"),
    ],
)
def test_settings_of_compressed_tensors_that_are_not_read(of_each_format, settings, named):
    checkpoint = of_each_format("int4, one scale a row")
    with pytest.raises(LigerModelsError, match=named):
        load(checkpoint.write(settings=int4_settings(strategy="channel") | settings))


def test_the_group_of_a_module_is_found_by_name_before_class(of_each_format):
    checkpoint = of_each_format("int4, one scale a row")
    settings = int4_settings(strategy="group", group_size=7)
    own = {"targets": ["re:model.layers.*_proj"], "weights": {"num_bits": 4, "strategy": "channel"}}
    settings["config_groups"]["group_1"] = own
    load(checkpoint.write(settings=settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (modelopt("W4A8_AWQ"), "quant_algo = 'W4A8_AWQ'"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}), "quantized_layers"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": 1}), "quantized_layers"),
        (modelopt("NVFP4", exclude_modules=["*experts*"]), r"excludes it from quantisation \('\*experts"),
    ],
)
def test_settings_of_modelopt_that_are_not_read(of_each_format, settings, named):
    with pytest.raises(LigerModelsError, match=named):
        load(of_each_format("nvfp4 of modelopt").write(settings=settings))


def test_scales_of_inputs_that_belong_into_the_weight_are_refused(of_each_format):
    checkpoint = of_each_format("nvfp4 of modelopt")
    name = checkpoint.quantised[0].removesuffix("weight") + "pre_quant_scale"
    with pytest.raises(CheckpointError, match=f"{name}.*not supported"):
        load(checkpoint.write(**{name: torch.ones(48)}))


def test_an_older_export_of_modelopt_has_its_settings_in_a_file_of_their_own(tmp_path):
    checkpoint = CASES["nvfp4 of modelopt"](tmp_path)
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    found = dict(load(checkpoint.write(settings=None)).checkpoint_tensors())
    for name in checkpoint.quantised:
        assert torch.equal(found[name], checkpoint.expected(torch.bfloat16)[name])


def test_a_mixed_export_of_modelopt_is_read_by_its_tensors(tmp_path):
    makers = {
        "*.self_attn.*_proj.weight": float8_of(lambda shape: (), torch.float32, "_scale"),
        "*.mlp.*_proj.weight": nvfp4("_scale_2", divides=False),
    }
    layers = {
        "model.layers.0.mlp": {"quant_algo": "NVFP4"},
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
    }
    settings = modelopt("MIXED_PRECISION", quantized_layers=layers)
    checkpoint = QuantisedCheckpoint.make(tmp_path, QWEN, makers, settings)
    found = dict(load(checkpoint.folder).checkpoint_tensors())
    for name in checkpoint.quantised:
        assert torch.equal(found[name], checkpoint.expected(torch.bfloat16)[name])


@pytest.mark.parametrize(
    "change", [{"shape": [84]}, {"blocksize": 7}, {"quant_type": "nf3"}, {"shape": [48, 84]}]
)
def test_a_description_of_nf4_that_does_not_fit_is_refused(of_each_format, change):
    checkpoint = of_each_format("nf4")
    name = f"{UP}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(checkpoint.tensors[name].tolist())) | change
    stored = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(checkpoint.write(**{name: stored}))


def test_a_matrix_of_int8_that_is_not_stored_row_by_row_is_refused(of_each_format):
    checkpoint = of_each_format("int8 of bitsandbytes")
    name = f"{UP}_format"
    with pytest.raises(CheckpointError, match=f"{name}.*not stored row by row"):
        load(checkpoint.write(**{name: torch.tensor(1, dtype=torch.uint8)}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"_type": "Int4PreshuffledTensor"},
            "torchao's Int4PreshuffledTensor, whose codes are in the order of",
        ),
        ({"_type": "Int3Tensor"}, "torchao's Int3Tensor, which is not known here"),
        ({"_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, "whose inputs are scaled before"),
        ({"_data": {"block_size": [16]}}, r"with block_size = \[16\], expected"),
        ({"_data": None}, "which is not how torchao describes a tensor"),
        (None, "holds torchao's codes, but the metadata of the files.*does not describe it"),
    ],
)
def test_descriptions_of_torchao_that_are_not_read(of_each_format, change, named):
    checkpoint = of_each_format("int8 of torchao, groups")
    changed = QuantisedCheckpoint(**vars(checkpoint) | {"metadata": dict(checkpoint.metadata)})
    described = json.loads(changed.metadata.pop(UP))
    if change is not None:
        changed.metadata[UP] = json.dumps(described | change)
    with pytest.raises(LigerModelsError, match=named) as error:
        load(changed.write())
    assert UP.removesuffix("weight") in str(error.value)
