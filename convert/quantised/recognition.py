"""Recognition of quantised checkpoints by their config and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError, abbreviate
from liger_models.convert.json_file import read_json
from liger_models.convert.quantised.bitnet import bitnet, is_bitnet
from liger_models.convert.quantised.bitsandbytes import bitsandbytes
from liger_models.convert.quantised.codes import FLOAT8_DTYPES
from liger_models.convert.quantised.compressed_tensors import compressed_tensors
from liger_models.convert.quantised.formats import QuantisedWeight
from liger_models.convert.quantised.methods import fbgemm_fp8, fp8, mxfp4
from liger_models.convert.quantised.modelopt import modelopt
from liger_models.convert.quantised.pairing import Pairing
from liger_models.convert.quantised.torchao import torchao

KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"

METHODS: dict[str, Callable[[Pairing], None]] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "mxfp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "torchao": torchao,
    "bitnet": bitnet,
}

# Methods that are not read, and the suffix by which such a repository's name differs from the original's.
_REFUSED = {
    "gptq": "-GPTQ or -GPTQ-Int4",
    "awq": "-AWQ",
    "quark": "-FP8, -MXFP4 or -KV and the owner amd",
    "aqlm": "-AQLM",
    "hqq": "-HQQ",
    "auto-round": "-AutoRound or -int4-inc",
    "auto_round": "-AutoRound or -int4-inc",
    "vptq": "-VPTQ",
    "eetq": "-EETQ",
    "quanto": "-quanto",
    "higgs": "-HIGGS",
    "spqr": "-SpQR",
    "fp_quant": "-FPQuant",
}


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a checkpoint are quantised.

    Attributes:
        method: `quant_method` of its config.
        settings: the content of its `quantization_config`.
        weights: the quantised weights, by the name of the dense weight.
        ignored: names of scales of activations and of the cache, which are of no use here.
        described_by: names of further tensors that describe weights, such as their shapes.
        metadata: of the files, if it describes weights (torchao), or empty.
        remarks: for the user, one sentence each.
    """

    method: str
    settings: Mapping[str, Any]
    weights: Mapping[str, QuantisedWeight]
    ignored: tuple[str, ...]
    described_by: tuple[str, ...]
    metadata: Mapping[str, str]

    @property
    def remarks(self) -> list[str]:
        found = []
        if not self.weights and not is_bitnet(self.settings):
            found.append(
                f"config.json says that the weights are quantised ({self.method}), but all of them are "
                "dense; they are read as they are"
            )
        if self.ignored:
            found.append(
                f"{len(self.ignored)} scales of activations or of the cache ({self.ignored[0]!r} and so on) "
                "are ignored: the model computes in the dtype of its parameters"
            )
        return found


def recognise(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    read: Callable[[TensorInfo], Tensor] | None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Quantisation | None:
    """Find the quantised weights of a checkpoint; None if it is not quantised.

    Args:
        folder: for messages, and for `hf_quant_config.json`.
        config: the content of config.json.
        tensors: the tensors in the files, by name.
        read: reads a small tensor; None if only the headers of the files are known.
        metadata: of the files.

    Raises:
        UnsupportedModelError: the method is not supported; says where the original weights are.
        ConfigError: a setting has an unknown value.
        CheckpointError: a scale is missing, left over, or has another shape or dtype than the format demands.
    """
    settings = settings_of(config) or _modelopt_settings(folder)
    if settings is None:
        _check_dense(folder, tensors)
        return None
    method = settings.get("quant_method")
    if method is None and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        method = "bitsandbytes"  # as old versions wrote it
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported(folder, method)
    pairing = Pairing(settings, tensors, folder, read, metadata)
    METHODS[method](pairing)
    pairing.finish()
    return Quantisation(
        method,
        settings,
        pairing.weights,
        tuple(pairing.ignored),
        tuple(pairing.described_by),
        metadata if method == "torchao" else {},
    )


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation settings of a config.json: at its top, or in the part of the language model.

    Raises:
        ConfigError: they are not an object.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            if (settings := part.get(key)) is not None:
                if not isinstance(settings, Mapping):
                    raise ConfigError(f"config.json: {key} must be an object, found {abbreviate(settings)}")
                return settings
    return None


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with dense weights, in bfloat16 if it states no dtype. BitNet's settings
    remain: they also say what the model computes.
    """
    dense = {
        key: dense_config(value) if key == "text_config" and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in KEYS or is_bitnet(value)
    }
    stated = any(dense.get(key) for key in ("dtype", "torch_dtype"))
    return dense if stated or len(dense) == len(config) else {**dense, "dtype": "bfloat16"}


def _modelopt_settings(folder: Path) -> Mapping[str, Any] | None:
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return None
    settings = read_json(path, ConfigError).get("quantization")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: has no object 'quantization'")
    return {"quant_method": "modelopt", **settings}


def _unsupported(folder: Path, method: Any) -> UnsupportedModelError:
    supported = ", ".join(METHODS)
    if not isinstance(method, str) or method not in _REFUSED:
        return UnsupportedModelError(
            f"{folder}: the weights are quantised with {abbreviate(method)}, which is not known here; "
            f"supported are {supported}. Use the original weights"
        )
    return UnsupportedModelError(
        f"{folder}: the weights are quantised with {method}, which is not supported (supported are "
        f"{supported}). Use the original bfloat16 weights: their repository is named as base_model on the "
        f"page of this one, and usually has its name without {_REFUSED[method]}"
    )


def _check_dense(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse quantised tensors whose format is unknown because the config says nothing about them."""
    for name, info in tensors.items():
        scaled = any(f"{name}{ending}" in tensors for ending in ("_scale_inv", "_scale"))
        half = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors
        unnamed = name.endswith("_blocks") and info.dtype.is_floating_point
        if (info.dtype in FLOAT8_DTYPES and scaled) or half or unnamed or info.dtype == torch.float8_e8m0fnu:
            raise CheckpointError(
                f"{folder / info.file}: tensor {name!r} ({info.dtype}) is quantised or named as if it were, "
                "but config.json has no quantization_config that says how. transformers writes such folders "
                "when a model is saved that it had dequantised; use the original checkpoint, or add its "
                "quantization_config"
            )
