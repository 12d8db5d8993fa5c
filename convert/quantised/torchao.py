"""Weights in the formats of torchao, as its safetensors support and transformers' `TorchAoConfig` write them.

The metadata in the header of each file describes every tensor of the model, as JSON:

    "X.weight": {"_type": "Float8Tensor", "_data": {"block_size": [1, 4096], ...},
                 "_tensor_data_names": ["qdata", "scale"]}

and the files hold its parts: `X._weight_qdata`, `X._weight_scale` and so on. The rows and the columns of a
block share a scale, and a zero point if there are any:

    Float8Tensor                qdata float8_e4m3fn, value = code scale
    Int8Tensor,
    IntxUnpackedToInt8Tensor    qdata int8, of any width in bits, value = (code - zero) scale
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.errors import CheckpointError, UnsupportedModelError, abbreviate
from liger_models.convert.quantised.codes import FLOAT8, INT8
from liger_models.convert.quantised.formats import CODES, MATRIX, ROW, SCALE, ZERO, Blocks
from liger_models.convert.quantised.pairing import FLOAT_SCALES, Pairing

NUMBERS = {"Float8Tensor": FLOAT8, "Int8Tensor": INT8, "IntxUnpackedToInt8Tensor": INT8}
DENSE = "Tensor"
CODES_ENDING = "_qdata"

# Types that are not read, and why.
_REFUSED = {
    "Int4Tensor": "whose zero points are added to the weights, in an order of one kernel",
    "Int4PreshuffledTensor": "whose codes are in the order of one kernel",
    "Int4TilePackedTo4dTensor": "whose codes are in the order of one kernel",
    "Int4PlainInt32Tensor": "whose codes are in the order of one kernel",
    "IntxOpaqueTensor": "whose codes are in the order of one kernel",
}


def torchao(pairing: Pairing) -> None:
    """Add the weights of a checkpoint that torchao wrote."""
    for name, described in _descriptions(pairing):
        _add(pairing, name, described)
    for _, info in pairing.named(CODES_ENDING):
        if not pairing.is_part(info):
            raise CheckpointError(
                f"{pairing.where(info)}: tensor {info.name!r} holds torchao's codes, but the metadata of the "
                "files, which says how to read them, does not describe it; if another program rewrote the "
                "files, or only their headers are known, download the checkpoint"
            )
    if not pairing.settings.get("include_input_output_embeddings"):
        pairing.check_excluded(pairing.modules("modules_to_not_convert"), str.__eq__)


def _descriptions(pairing: Pairing) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The quantised tensors that the metadata describes, by name."""
    for name, text in pairing.metadata.items():
        if "." not in name:  # of the file
            continue
        try:
            described = json.loads(text)
            kind, names = described["_type"], described.get("_tensor_data_names", [])
            good = isinstance(kind, str) and all(isinstance(part, str) for part in names)
            good = good and (kind == DENSE or isinstance(described["_data"], dict))
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise CheckpointError(
                f"the metadata of the files describes {name!r} as {abbreviate(text)}, which is not how "
                "torchao describes a tensor; download the checkpoint again"
            )
        if kind != DENSE:
            yield name, described


def _add(pairing: Pairing, name: str, described: Mapping[str, Any]) -> None:
    module, _, leaf = name.rpartition(".")
    kind, roles = described["_type"], described["_tensor_data_names"]

    def part(role: str) -> str:
        return f"{module}._{leaf}_{role}"

    codes = pairing.get(part("qdata"))
    if codes is None:
        raise CheckpointError(
            f"{part('qdata')!r} is not in the checkpoint, but the metadata of its files says that {name!r} "
            f"consists of {', '.join(roles)}; download the checkpoint again"
        )
    if kind not in NUMBERS or "act_pre_scale" in roles:
        reason = _REFUSED.get(kind, "which is not known here")
        if "act_pre_scale" in roles:
            reason = "whose inputs are scaled before the product (AWQ, SmoothQuant)"
        raise UnsupportedModelError(
            f"{pairing.where(codes)}: {name!r} is stored as torchao's {kind}, {reason}; supported are "
            f"{', '.join(NUMBERS)}. Use the original bfloat16 weights: their repository is named as "
            "base_model on the page of this one"
        )
    pairing.check_matrix(codes)
    format = Blocks(NUMBERS[kind], _block(pairing, name, codes, described))
    scale = pairing.companion(codes, part("scale"))
    parts: dict[str, TensorInfo | None] = {CODES: codes, SCALE: scale}
    if "zero_point" in roles:
        parts[ZERO] = zero = pairing.companion(codes, part("zero_point"))
        pairing.check(zero, format.scale_shapes(codes.shape), [torch.int8], codes.shape)
    pairing.add_blocks(name, codes.shape, format, parts, scales=FLOAT_SCALES)


def _block(pairing: Pairing, name: str, codes: TensorInfo, described: Mapping[str, Any]) -> Any:
    """The rows and columns that share a scale."""
    stated = described["_data"].get("block_size")
    good = isinstance(stated, list) and len(stated) == len(codes.shape)
    good = good and all(type(size) is int and size > 0 for size in stated)
    if not good or any(size != 1 for size in stated[:-2]):
        raise CheckpointError(
            f"{pairing.where(codes)}: the metadata describes {name!r} of shape {codes.shape} with block_size "
            f"= {abbreviate(stated)}, expected as many positive numbers, 1 for each dimension before the "
            "last two; download the checkpoint again"
        )
    rows, columns = stated[-2:]
    if columns >= codes.shape[-1]:
        return MATRIX if rows >= codes.shape[-2] else ROW if rows == 1 else (rows, columns)
    return rows, columns
