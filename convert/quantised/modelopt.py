"""Weights in the formats of NVIDIA's Model Optimizer: float8, and NVFP4 with two levels of scales.

    float8:  X.weight float8_e4m3fn [rows, columns], X.weight_scale
    NVFP4:   X.weight uint8 [rows, columns / 2], X.weight_scale float8_e4m3fn [rows, columns / 16], and
             X.weight_scale_2 float32, a factor of the matrix's scales

The settings are in config.json, or, of older exports, in hf_quant_config.json.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from liger_models.convert.quantised.codes import FLOAT4
from liger_models.convert.quantised.formats import CODES, MATRIX, ROW, SCALE, SECOND, Blocks
from liger_models.convert.quantised.pairing import Pairing

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def modelopt(pairing: Pairing) -> None:
    """Add the weights of a checkpoint that Model Optimizer wrote."""
    from liger_models.convert.quantised.methods import add_float8

    algorithm = pairing.setting("quant_algo", *ALGORITHMS)
    layers = pairing.settings.get("quantized_layers") or {}
    known = ["FP8", "NVFP4", "W4A16_NVFP4"]
    each = list(layers.values()) if isinstance(layers, dict) else [None]
    if not all(isinstance(layer, dict) and layer.get("quant_algo") in known for layer in each):
        raise pairing.bad_setting("quantized_layers", layers, f"layers with {', '.join(known)}")
    for name, codes in list(pairing.tensors.items()):
        if codes.dtype == torch.uint8 and name.endswith(".weight"):
            scale = pairing.companion(codes, f"{name}_scale")
            second = pairing.companion(codes, f"{name}_scale_2")
            pairing.check_matrix(codes)
            shape = (*codes.shape[:-1], 2 * codes.shape[-1])
            format = Blocks(FLOAT4, (1, 16), second="times", allow_zero=True)
            parts = {CODES: codes, SCALE: scale, SECOND: second}
            pairing.add_blocks(name, shape, format, parts, scales=(torch.float8_e4m3fn,))
    add_float8(pairing, [(128, 128)] if algorithm == "FP8_PB_WO" else [MATRIX, ROW])
    pairing.check_excluded(pairing.modules("ignore", "exclude_modules"), fnmatchcase)
