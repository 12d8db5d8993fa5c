"""The quantised checkpoints that tests read, one for each format in which weights are published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantised_files import (
    Maker,
    QuantisedCheckpoint,
    bnb_four_bits,
    bnb_int8,
    deepseek_v4_experts,
    float8_blocks,
    float8_of,
    int4,
    int8,
    mxfp4,
    mxfp4_packed,
    nvfp4,
    tiny,
    torchao,
    torchao_metadata,
)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
GPT_OSS = tiny("gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=1)
QWEN = tiny("qwen3", num_hidden_layers=1)
EXPERTS = tiny("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])


def blocks(*block: int, **options: Any) -> dict[str, Any]:
    return {**FP8, "weight_block_size": list(block), **options}


def _case(
    config: dict[str, Any], maker: Maker, settings: dict[str, Any] | None, **options: Any
) -> Callable[[Path], QuantisedCheckpoint]:
    return lambda folder: QuantisedCheckpoint.make(folder, config, maker, settings, **options)


def compressed(form: str, *, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for all linear layers."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def int4_settings(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **{"num_bits": 4, "type": "int", **weights})


def modelopt(algorithm: str, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "mtp*"], **settings}


def bnb(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"], **settings}


NF4 = bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {}}, "modules_to_not_convert": ["lm_head"]}
INTX = "IntxUnpackedToInt8Tensor"
UNEVEN = {**QWEN, "intermediate_size": 84}  # 84 is no multiple of 8
KIMI = (r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "lm_head")
scalar = torch.tensor(0.5)
CASES: dict[str, Callable[[Path], QuantisedCheckpoint]] = {
    # 48, 64, 80 rows and columns in blocks of 32 x 24 and so on: the last ones are cut off.
    "float8 blocks": _case(QWEN, float8_blocks((32, 24)), blocks(32, 24)),
    "float8 blocks, bfloat16 scales": _case(QWEN, float8_blocks((16, 16), torch.bfloat16), blocks(16, 16)),
    "float8 blocks, float4 experts (DeepSeek-V4)": _case(
        {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 32},
        {
            "*.experts.*_proj.weight": deepseek_v4_experts,
            "*_proj.weight": float8_blocks((24, 32), torch.float8_e8m0fnu, "!.scale"),
        },
        blocks(24, 32, scale_fmt="ue8m0", expert_dtype="fp4"),
    ),
    "float8 blocks, experts one by one": _case(EXPERTS, float8_blocks((16, 24)), blocks(16, 24)),
    "float8 blocks, stacked experts": _case(
        EXPERTS, float8_blocks((16, 24)), blocks(16, 24), weights="*.experts.*_proj", stacked=True
    ),
    "float8, one scale a matrix": _case(
        QWEN,
        float8_of(lambda shape: (), torch.bfloat16, "_scale_inv", **{"!.activation_scale": scalar}),
        {**FP8, "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
    ),
    "float8, one scale a matrix, older names": _case(
        QWEN,
        float8_of(lambda shape: (1,), torch.float32, "_scale", **{"!.input_scale": scalar}),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "mxfp8": _case(
        tiny("qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=96),
        float8_blocks((1, 32), torch.uint8),
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    ),
    "fbgemm": _case(
        QWEN,
        float8_of(lambda shape: (shape[0], 1), torch.float32, "_scale", **{"!.input_scale_ub": scalar}),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "int4, groups, experts (Kimi K2)": _case(
        {**EXPERTS, "hidden_size": 64},
        int4(32),
        int4_settings(strategy="group", group_size=32, ignore=KIMI),
        weights="*.experts.*_proj.weight",
    ),
    "int4, asymmetric": _case(
        UNEVEN, int4(4, True), int4_settings(strategy="group", group_size=4, symmetric=False)
    ),
    "int4, one scale a row": _case(UNEVEN, int4(None), int4_settings(strategy="channel")),
    "int4, ordered columns": _case(
        QWEN,
        int4(16, ordered=True),
        int4_settings(strategy="group", group_size=16, actorder="group"),
    ),
    "float8 of compressed-tensors, a row": _case(
        QWEN,
        float8_of(lambda shape: (shape[0], 1), torch.bfloat16, "_scale", **{"!.k_scale": scalar}),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "float8 of compressed-tensors, blocks": _case(
        QWEN,
        float8_blocks((32, 24), torch.bfloat16, "_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 24]),
    ),
    "int8 of compressed-tensors, asymmetric": _case(
        QWEN, int8(True), compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False)
    ),
    "nvfp4 of compressed-tensors": _case(
        QWEN,
        nvfp4("_global_scale", divides=True),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4 of compressed-tensors": _case(
        {**QWEN, "hidden_size": 64, "intermediate_size": 96},
        mxfp4_packed,
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "nvfp4 of modelopt": _case(
        EXPERTS, nvfp4("_scale_2", divides=False), modelopt("NVFP4"), weights="*.experts.*_proj.weight"
    ),
    "float8 of modelopt": _case(
        QWEN,
        float8_of(lambda shape: (), torch.float32, "_scale", **{"!.input_scale": scalar}),
        modelopt("FP8", kv_cache_scheme={"num_bits": 8}),
    ),
    "nf4": _case(QWEN, bnb_four_bits("nf4", False), NF4),
    "nf4, nested": _case(QWEN, bnb_four_bits("nf4", True), NF4),
    "nf4, nested, experts": _case(EXPERTS, bnb_four_bits("nf4", True), NF4),
    "fp4 in bfloat16 storage": _case(QWEN, bnb_four_bits("fp4", True, torch.bfloat16), NF4),
    "int8 of bitsandbytes": _case(QWEN, bnb_int8, bnb(load_in_8bit=True)),
    "float8 of torchao, blocks": _case(
        QWEN,
        torchao("Float8Tensor", (16, 24)),
        TORCHAO,
        describe=torchao_metadata("Float8Tensor", (16, 24)),
    ),
    "int8 of torchao, groups": _case(
        QWEN, torchao(INTX, (1, 16)), TORCHAO, describe=torchao_metadata(INTX, (1, 16))
    ),
    "mxfp4": _case(GPT_OSS, mxfp4, MXFP4, weights="*.experts.*_proj"),
}
