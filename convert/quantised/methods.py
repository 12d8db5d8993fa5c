"""Names and shapes of the tensors of quantised weights, by `quant_method`.

Each function adds the weights of a checkpoint to a pairing. The tensors decide what is quantised: a weight is
if it has a dtype of quantised weights and a scale. Lists of modules in a config are known to differ from the
files, in what they match and in the names they use.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from liger_models.convert.errors import CheckpointError
from liger_models.convert.quantised.codes import FLOAT4, FLOAT8, FLOAT8_DTYPES
from liger_models.convert.quantised.formats import CODES, COLUMN, MATRIX, ROW, SCALE, Blocks
from liger_models.convert.quantised.pairing import EXPONENTS, Pairing


def mxfp4(pairing: Pairing) -> None:
    """Stacked experts in float4 with groups of 32 (gpt-oss): OCP Microscaling (MX) 1.0.

    `X_blocks` uint8 [experts, rows, columns / 32, 16] and `X_scales` uint8 [experts, rows, columns / 32] are
    the weight `X` with its last two dimensions swapped.
    """
    format = Blocks(FLOAT4, (1, 32))
    for name, codes in pairing.named("_blocks"):
        if codes.dtype.is_floating_point and f"{name}_scales" not in pairing.tensors:
            raise CheckpointError(
                f"{pairing.where(codes)}: tensor {codes.name!r} is {codes.dtype}, which are not blocks of "
                "float4. A model that transformers had dequantised was probably saved with the names of its "
                f"quantised tensors: rename them to {name!r} and so on and remove quantization_config, or "
                "use the original checkpoint"
            )
        scale = pairing.companion(codes, f"{name}_scales")
        *rows, groups, _ = codes.shape if len(codes.shape) > 2 else (0, 0, 0)
        shape = (*rows, 32 * groups)
        pairing.check(codes, [(*rows, groups, 16)], [torch.uint8], shape)
        pairing.check(scale, [(*rows, groups)], [torch.uint8, torch.float8_e8m0fnu], shape)
        pairing.add(name, shape, format, {CODES: codes, SCALE: scale}, transposed=True)
    _check_excluded(pairing)


def fp8(pairing: Pairing) -> None:
    """float8 in blocks (DeepSeek-V3, 2024, arXiv:2412.19437, section 3.3), or with one scale a matrix or a
    row.

    Next to `X` float8_e4m3fn [..., rows, columns] there is `X_scale_inv`, or `X_scale`: in spite of the first
    name the factor of each block. DeepSeek-V4 has `Y.scale` next to `Y.weight`, and experts in float4, two in
    an int8, with groups of 32.
    """
    pairing.setting("activation_scheme", "dynamic", "static")
    pairing.setting("fmt", "e4m3", "float8_e4m3fn")
    pairing.setting("scale_fmt", "float", "ue8m0")
    pairing.setting("expert_dtype", "fp8", "fp4")
    block = pairing.settings.get("weight_block_size")
    if block is None and pairing.settings.get("quant_method") == "mxfp8":
        block = [1, 32]
    good = (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    )
    if block is not None and not good:
        raise pairing.bad_setting("weight_block_size", block, "two positive numbers, or null")
    add_float8(pairing, [tuple(block)] if block else [MATRIX, ROW])
    for name, codes in list(pairing.tensors.items()):
        scale = pairing.get(_own_scale(name)) if codes.dtype == torch.int8 else None
        if scale is not None:
            pairing.check_matrix(codes)
            shape = (*codes.shape[:-1], 2 * codes.shape[-1])
            parts = {CODES: codes, SCALE: scale}
            pairing.add_blocks(name, shape, Blocks(FLOAT4, (1, 32)), parts, scales=EXPONENTS)
    _check_excluded(pairing)


def fbgemm_fp8(pairing: Pairing) -> None:
    """float8 with a scale for each output: one a row of a linear layer, one a column of stacked experts.

    Stacked experts are stored [experts, inputs, outputs].
    """
    add_float8(pairing, [ROW, COLUMN])
    _check_excluded(pairing)


def add_float8(pairing: Pairing, blocks: list[Any]) -> None:
    """Add every float8 tensor, in the first of these `blocks` that its scale fits."""
    for name, codes in list(pairing.tensors.items()):
        if codes.dtype not in FLOAT8_DTYPES or pairing.is_part(codes):  # scales are in float8, too
            continue
        pairing.check_matrix(codes)
        scale = pairing.companion(codes, f"{name}_scale_inv", f"{name}_scale", _own_scale(name))
        formats = [Blocks(FLOAT8, block) for block in blocks]
        fitting = [format for format in formats if scale.shape in format.scale_shapes(codes.shape)]
        pairing.add_blocks(name, codes.shape, (fitting or formats)[0], {CODES: codes, SCALE: scale})


def _own_scale(name: str) -> str:
    """The name of a module's scale, in DeepSeek-V4's manner."""
    return f"{name.rpartition('.')[0]}.scale"


def _check_excluded(pairing: Pairing) -> None:
    pairing.check_excluded(pairing.modules("modules_to_not_convert", "ignored_layers"), fnmatchcase)
