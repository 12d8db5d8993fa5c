"""Checkpoints of BitNet b1.58: weights of three values, in two bits.

    W[i * rows/4 + r, c] = (bits 2 i and 2 i + 1 of X.weight[r, c] - 1) * X.weight_scale        i = 0 .. 3

Such a model also rounds its inputs, so that its `quantization_config` is a part of what it computes
(layers/projections/ternary.py), and remains in its config. In the mode "online" the files hold master
weights, which the model rounds itself; in the mode "offline" they hold rounded ones, packed as above. (What
transformers calls the class "bitlinear" multiplies otherwise, and is not supported.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import ConfigError, UnsupportedModelError, abbreviate
from liger_models.convert.quantised.codes import as_scale
from liger_models.convert.quantised.formats import (
    CODES,
    SCALE,
    BadScaleError,
    Fetch,
    Format,
    QuantisedWeight,
    check_scales,
)
from liger_models.convert.quantised.pairing import FLOAT_SCALES, Pairing

METHOD = "bitnet"
VALUES = 4  # in a byte
_KNOWN = {
    *("quant_method", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps"),
    "modules_to_not_convert",
}


def is_bitnet(settings: Any) -> bool:
    """Whether these are settings of BitNet's products."""
    return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD


def rounds_weights(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the weights are master weights, which the model rounds; else they are rounded in the files.

    Args:
        settings: the content of `quantization_config`.
        name: origin of the config, for messages.

    Raises:
        UnsupportedModelError: a kind of product that is not supported.
        ConfigError: a setting has an unknown value.
    """
    where = f"{name}: quantization_config"
    unknown = {key: value for key, value in settings.items() if key not in _KNOWN and value is not None}
    if unknown:
        raise ConfigError(
            f"{where} has unknown settings, {abbreviate(unknown)}, which may change the products"
        )
    if (kind := settings.get("linear_class") or "bitlinear") != "autobitlinear":
        raise UnsupportedModelError(
            f"{where} has linear_class {kind!r}; expected 'autobitlinear'. The products of other classes "
            "round otherwise; use a checkpoint of the same model with master weights, in bfloat16"
        )
    if settings.get("use_rms_norm"):
        raise UnsupportedModelError(
            f"{where} has use_rms_norm, which gives each linear layer a norm of its own; expected false"
        )
    excluded = settings.get("modules_to_not_convert")
    if excluded is not None and excluded != ["lm_head"]:
        raise UnsupportedModelError(
            f"{where} has modules_to_not_convert {abbreviate(excluded)}; expected null or ['lm_head']: all "
            "linear layers of decoder layers round their operands here, and the head does not"
        )
    mode = settings.get("quantization_mode") or "offline"
    if mode not in ("online", "offline"):
        raise ConfigError(f"{where} has quantization_mode {mode!r}; expected 'online' or 'offline'")
    return bool(mode == "online")


def bitnet(pairing: Pairing) -> None:
    """Weights of three values: `X.weight` uint8 [rows / 4, columns], and the factor `X.weight_scale` [1]."""
    if rounds_weights(pairing.settings, pairing.folder_name):
        return
    for name, codes in list(pairing.tensors.items()):
        if codes.dtype != torch.uint8 or not name.endswith(".weight"):
            continue
        pairing.check_matrix(codes)
        scale = pairing.companion(codes, f"{name}_scale")
        shape = (VALUES * codes.shape[0], *codes.shape[1:])
        pairing.check(scale, [(1,), ()], FLOAT_SCALES, shape)
        pairing.add(name, shape, ThreeValues(), {CODES: codes, SCALE: scale})


@dataclass(frozen=True)
class ThreeValues(Format):
    """A matrix of three values times a factor; a byte has an element of each quarter of its rows."""

    label: str = "three values, one scale a matrix"

    def rows_of(self, role: str, shape: tuple[int, int], dtype: torch.dtype) -> int:
        return shape[0] // VALUES if role == CODES else 1

    def check_stack(
        self, shape: tuple[int, int], parts: Mapping[str, Tensor], name_of: Callable[[str, int], str]
    ) -> None:
        if SCALE in parts:
            check_scales(as_scale(parts[SCALE]), lambda number: name_of(SCALE, number), False)

    def decode(
        self, weight: QuantisedWeight, fetch: Fetch, start: int, stop: int, device: torch.device
    ) -> Tensor:
        rows, columns = weight.shape
        quarter, first, last = rows // VALUES, start // columns, -(-stop // columns)
        scale = as_scale(fetch(SCALE, 0, 1).to(device))
        check_scales(scale[None], lambda _: weight.parts[SCALE].name, False)
        bands, row = [], first
        while row < last:
            number, top = divmod(row, quarter)
            bottom = min(top + last - row, quarter)
            codes = fetch(CODES, top * columns, bottom * columns).to(device) >> 2 * number & 3
            if (codes == 3).any():
                raise BadScaleError(
                    f"tensor {weight.parts[CODES].name!r} holds a fourth value, but its weights have three; "
                    "the file is damaged: download it again"
                )
            bands.append((codes.float() - 1) * scale)
            row += bottom - top
        return torch.cat(bands)[start - first * columns : stop - first * columns]


def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode one matrix: codes uint8 [rows / 4, columns], a scale of one element; [rows, columns]."""
    factor, rows = scale.float().reshape(()), len(codes)
    out = torch.empty(VALUES * rows, codes.shape[1], dtype=dtype, device=codes.device)
    for number in range(VALUES):  # the three products, each rounded once
        part = out[number * rows : (number + 1) * rows]
        part.copy_(codes >> 2 * number & 3).sub_(1).mul_(factor.to(dtype))
    return out
