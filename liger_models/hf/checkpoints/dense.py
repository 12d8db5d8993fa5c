"""Quantised checkpoints in transformers' loader, which gets their weights dense.

Formats that `liger_models.convert.quantised` reads are decoded there, and not by transformers' quantisers:
these need a GPU for some formats, and are wrong for others (ragged blocks, stacked experts). Layers of
bitsandbytes and torchao train as they are, with adapters, and so keep transformers' own path, as do those of
BitNet, which round their operands.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from liger_models.convert.json_file import read_json
from liger_models.convert.quantised.reader import ModelReader
from liger_models.convert.quantised.recognition import METHODS, MODELOPT_FILE, settings_of

_LOCATION = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_LEFT_TO_TRANSFORMERS = ("bitsandbytes", "torchao", "bitnet")


def family_of(args: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """The model type of the checkpoint that these arguments of `from_pretrained` name, or of their config."""
    place, config = _config_of(args, options)
    if place is not None:
        return PreTrainedConfig.get_config_dict(place, **_location(options))[0].get("model_type")
    return None if config is None else config.model_type


def with_dense_config(config_class: Any, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained`, with a config of dense weights if the checkpoint is quantised in a
    format that is decoded here. A request to dequantise, such as `Mxfp4Config(dequantize=True)`, is then met.
    """
    place, config = _config_of(args, options)
    if place is not None:
        config = config_class.from_pretrained(place, **_location(options))
    settings = None if config is None else settings_of(config.to_dict())
    if settings is None or not _is_decoded_here(settings):
        return options
    config = copy.deepcopy(config)
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if config.dtype is None:
        config.dtype = torch.bfloat16
    options = {**options, "config": config}
    if getattr(options.get("quantization_config"), "dequantize", False):
        del options["quantization_config"]
    return options


def _config_of(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The name or folder from which `from_pretrained` reads the config, or None, and else the config."""
    config: Any = options.get("config")
    name = args[0] if args else options.get("pretrained_model_name_or_path")
    if isinstance(config, str | Path) or (config is None and name is not None):
        return config or name, None
    return None, config


def _location(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in _LOCATION if key in options}


@contextmanager
def dense_tensors(model: Any, files: Sequence[str] | None) -> Iterator[dict[str, Any] | None]:
    """Yield the tensors of a quantised checkpoint, each decoded when transformers' loader takes it; None for
    other checkpoints.
    """
    folder = Path(files[0]).parent if files else None
    if folder is None or not _may_be_decoded(folder):
        yield None
        return
    # Only matrices are quantised. They are decoded in the dtype of the model's, or rounded by the loader.
    dtypes = {p.dtype for p in model.parameters() if p.dim() > 1}
    with ModelReader(folder) as reader:
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        yield {name: _Lazy(reader, name, dtype) for name in reader.tensors}


def _may_be_decoded(folder: Path) -> bool:
    config = folder / "config.json"
    settings = settings_of(read_json(config)) if config.is_file() else None
    return (folder / MODELOPT_FILE).is_file() if settings is None else _is_decoded_here(settings)


def _is_decoded_here(settings: Mapping[str, Any]) -> bool:
    method = settings.get("quant_method")
    return isinstance(method, str) and method in METHODS and method not in _LEFT_TO_TRANSFORMERS


class _Lazy:
    """A tensor that is read when it is indexed, like a slice of a safetensors file."""

    def __init__(self, reader: ModelReader, name: str, dtype: torch.dtype):
        self._reader, self._name, self._dtype = reader, name, dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader.read_dense(self._name, self._dtype)[index]
