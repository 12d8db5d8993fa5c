"""Weights in the formats of compressed-tensors (the library of llm-compressor), by `config_groups`.

    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", ...}}}

A group says how the weights of the modules among its targets are quantised: a class name (Linear), the name
of
a module, or "re:" and a regular expression that matches the beginning of the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.errors import CheckpointError
from liger_models.convert.quantised.codes import FLOAT4, FLOAT8, FLOAT8_DTYPES, INT8, PACKED
from liger_models.convert.quantised.formats import CODES, GROUPS, MATRIX, ROW, SCALE, SECOND, ZERO, Blocks
from liger_models.convert.quantised.pairing import EXPONENTS, FLOAT_SCALES, Pairing

PACKED_NAME = ".weight_packed"
DENSE_STATUS = ("initialized", "calibration", "frozen")  # weights to be quantised are stored dense


def compressed_tensors(pairing: Pairing) -> None:
    """Add the weights of a checkpoint that llm-compressor wrote."""
    settings = pairing.settings
    if settings.get("transform_config"):
        raise pairing.bad_setting(
            "transform_config",
            settings["transform_config"],
            "none: the weights were rotated (SpinQuant, QuIP), which is not supported",
        )
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise pairing.bad_setting("sparsity_config", sparsity, "none, or the format 'dense'")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise pairing.bad_setting("config_groups", groups, "an object of objects")
    status = pairing.setting("quantization_status", "compressed", *DENSE_STATUS, default="compressed")
    ignored = pairing.modules("ignore")
    if status in DENSE_STATUS:
        return
    for name, codes in list(pairing.tensors.items()):
        packed = name.endswith(PACKED_NAME)
        if packed or (name.endswith(".weight") and codes.dtype in (torch.int8, *FLOAT8_DTYPES)):
            module = name.removesuffix(PACKED_NAME if packed else ".weight")
            _add(pairing, codes, module, _group_of(pairing, codes, module, groups))
    pairing.check_excluded(ignored, _matches)


def _matches(module: str, pattern: str) -> bool:
    try:
        return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else module == pattern
    except re.error:
        return False


def _group_of(
    pairing: Pairing, codes: TensorInfo, module: str, groups: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The first group that has the module among its targets by name, or else by class."""
    by_class = None
    for group in groups.values():
        listed = group.get("targets") or []
        targets = [str(target) for target in listed] if isinstance(listed, list) else []
        if any(_matches(module, target) for target in targets):
            return group
        if by_class is None and any(re.fullmatch(r"[A-Z]\w*", target) for target in targets):
            by_class = group
    if by_class is not None:
        return by_class
    raise CheckpointError(
        f"{pairing.where(codes)}: tensor {codes.name!r} is quantised, but no group of config_groups in "
        "config.json has its module among its targets; config.json or the file belongs to another checkpoint"
    )


def _add(pairing: Pairing, codes: TensorInfo, module: str, group: Mapping[str, Any]) -> None:
    kind = group.get("format") or pairing.settings.get("format")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise pairing.bad_setting("weights of a group", weights, "an object")
    name, scale = f"{module}.weight", pairing.companion(codes, f"{module}.weight_scale")
    parts: dict[str, TensorInfo | None] = {CODES: codes, SCALE: scale}
    pairing.check_matrix(codes)
    match kind:
        case "nvfp4-pack-quantized":
            shape = (*codes.shape[:-1], 2 * codes.shape[-1])
            parts[SECOND] = pairing.companion(codes, f"{module}.weight_global_scale")
            format = Blocks(FLOAT4, (1, 16), second="divided by", allow_zero=True)
            pairing.add_blocks(name, shape, format, parts, scales=(torch.float8_e4m3fn,))
        case "mxfp4-pack-quantized":
            shape = (*codes.shape[:-1], 2 * codes.shape[-1])
            pairing.add_blocks(name, shape, Blocks(FLOAT4, (1, 32)), parts, scales=EXPONENTS)
        case "mxfp8-quantized":
            pairing.add_blocks(name, codes.shape, Blocks(FLOAT8, (1, 32)), parts)
        case "pack-quantized":
            _add_packed(pairing, codes, module, weights, parts)
        case "float-quantized" | "naive-quantized" | "int-quantized":
            numbers = INT8 if codes.dtype == torch.int8 else FLOAT8
            if not weights.get("symmetric", True):
                parts[ZERO] = zero = pairing.companion(codes, f"{module}.weight_zero_point")
                pairing.check(zero, [scale.shape], [torch.int8], codes.shape)
            elif unexpected := pairing.get(f"{module}.weight_zero_point"):
                raise _unexpected(pairing, unexpected)
            format = Blocks(numbers, _block(pairing, weights))
            pairing.add_blocks(name, codes.shape, format, parts, scales=FLOAT_SCALES)
        case _:
            expected = (
                "pack-quantized, float-quantized, int-quantized, nvfp4-pack-quantized or mxfp4-pack-quantized"
            )
            raise pairing.bad_setting("format", kind, expected)


def _add_packed(
    pairing: Pairing,
    codes: TensorInfo,
    module: str,
    weights: Mapping[str, Any],
    parts: dict[str, TensorInfo | None],
) -> None:
    """Add integers that are packed in words of 32 bits, with the number of columns in a tensor of its own."""
    bits, scale = weights.get("num_bits"), parts[SCALE]
    assert scale is not None
    if type(bits) is not int or bits not in PACKED:
        raise pairing.bad_setting("num_bits", bits, "4 or 8")
    format = Blocks(PACKED[bits], _block(pairing, weights))
    stated = pairing.companion(codes, f"{module}.weight_shape")
    pairing.check(stated, [(2,)], [torch.int64, torch.int32], codes.shape)
    rows, columns = codes.shape[0], codes.shape[-1] * 32 // bits
    if (found := pairing.values(stated)) is not None:
        rows, columns = (int(size) for size in found.tolist())
    shape, width = (rows, columns), format.codes.words(columns)
    if rows < 1 or columns < 1 or codes.shape != (rows, width):
        raise CheckpointError(
            f"{pairing.where(stated)}: tensor {stated.name!r} says that the weight has the shape {shape}, "
            f"but {codes.name!r} has the shape {codes.shape}, expected {(rows, width)}"
        )
    grid = format.grid(shape)
    if not weights.get("symmetric", True):
        parts[ZERO] = zero = pairing.companion(codes, f"{module}.weight_zero_point")
        if format.block[0] is None:
            raise pairing.bad_setting(
                "strategy", weights.get("strategy"), "'group' or 'channel' without symmetry"
            )
        pairing.check(zero, [(-(-grid[0] * bits // 32), grid[1])], [torch.int32], shape)
    elif unexpected := pairing.get(f"{module}.weight_zero_point"):
        raise _unexpected(pairing, unexpected)
    if (of_columns := pairing.get(f"{module}.weight_g_idx")) is not None:
        pairing.check(of_columns, [(columns,)], [torch.int32, torch.int64], shape)
        parts[GROUPS] = of_columns
    elif weights.get("actorder") == "group":
        parts[GROUPS] = pairing.companion(codes, f"{module}.weight_g_idx")
    pairing.own(stated)
    pairing.add_blocks(f"{module}.weight", shape, format, parts, scales=FLOAT_SCALES)


def _block(pairing: Pairing, weights: Mapping[str, Any]) -> Any:
    """The rows and columns that share a scale."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    structure: Any = weights.get("block_structure")
    if strategy is None:  # the library's default
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return 1, size
    pair = isinstance(structure, list) and len(structure) == 2
    if strategy == "block" and pair and all(type(n) is int and n > 0 for n in structure):
        return tuple(structure)
    if strategy in ("tensor", "channel"):
        return MATRIX if strategy == "tensor" else ROW
    raise pairing.bad_setting(
        "the strategy of weights",
        {key: weights.get(key) for key in ("strategy", "group_size", "block_structure")},
        "'tensor', 'channel', 'group' with a group_size, or 'block' with a block_structure",
    )


def _unexpected(pairing: Pairing, zero: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{pairing.where(zero)}: tensor {zero.name!r} is a zero point, but config.json says that the weight "
        "is quantised symmetrically; config.json or the file belongs to another checkpoint"
    )
