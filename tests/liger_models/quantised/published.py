"""The quantised checkpoints that tests read, one for each format in which weights are published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantised_files import Maker, QuantisedCheckpoint, float8_blocks, float8_of, mxfp4, tiny

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


scalar = torch.tensor(0.5)
CASES: dict[str, Callable[[Path], QuantisedCheckpoint]] = {
    # 48, 64, 80 rows and columns in blocks of 32 x 24 and so on: the last ones are cut off.
    "float8 blocks": _case(QWEN, float8_blocks((32, 24)), blocks(32, 24)),
    "float8 blocks, bfloat16 scales": _case(QWEN, float8_blocks((16, 16), torch.bfloat16), blocks(16, 16)),
    "float8 blocks, e8m0 scales": _case(
        QWEN, float8_blocks((24, 32), torch.float8_e8m0fnu), blocks(24, 32, scale_fmt="ue8m0")
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
    "mxfp4": _case(GPT_OSS, mxfp4, MXFP4, weights="*.experts.*_proj"),
}
