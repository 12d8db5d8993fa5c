"""Models whose linear layers keep the quantised weights of their checkpoint (docs/quantised.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.reading import load_parameters
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.convert.quantised.formats import BadScaleError, QuantisedWeight
from liger_models.convert.quantised.reader import ModelReader, QuantisedInfo
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.models.causal_lm import LigerCausalLM


def check_can_keep(
    folder: Path, reader: ModelReader, projections: str, shard: Any, float8: Any, adapter: Any
) -> None:
    """Raise ConfigError if a checkpoint's quantised weights cannot be kept with these options."""
    if not reader.is_quantised:
        raise ConfigError(
            f"{folder}: keep_quantised keeps quantised weights, but this checkpoint has none; omit it"
        )
    if projections != "split":
        raise ConfigError(
            f"keep_quantised needs separate projections, found projections={projections!r}; pass 'split'"
        )
    if shard is not None or float8 is not None or adapter is not None:
        which = (
            "shard" if shard is not None else "float8" if float8 is not None else "a checkpoint of adapters"
        )
        raise ConfigError(f"keep_quantised cannot be combined with {which}; omit one of them")


def keep_stored(model: LigerCausalLM, reader: ModelReader) -> Callable[[], None]:
    """Give a model on the meta device, with split projections, layers for the weights that the checkpoint has
    quantised. Returns a function that reads all tensors once the model has memory.

    Raises:
        UnsupportedModelError: a quantised weight that cannot be kept: of stacked experts, of a head, or in a
            format with zero points, reordered columns or tables.
    """
    weight_map = model.weight_map()
    kept: dict[str, QuantisedWeight] = {}
    for native, expr in weight_map.items():
        infos = {
            ref.name: info
            for ref in expr.refs()
            if isinstance(info := reader.tensors[ref.name], QuantisedInfo)
        }
        for name, info in infos.items():
            path = native.removesuffix(".weight")
            layer: Any = model.get_submodule(path) if path != native else None
            whole = (
                isinstance(expr, Ref) and not info.weight.transposed and StoredLinear.can_store(info.weight)
            )
            if not whole or type(layer) not in (nn.Linear, Linear) or info.shape != tuple(layer.weight.shape):
                raise UnsupportedModelError(
                    f"{reader.folder / info.file}: {name!r} ({info.weight.format.label}) cannot be kept "
                    "quantised: only float8, int8 or 4-bit weights of single linear layers can, with scales "
                    "alone, and not stacked experts; omit keep_quantised to hold the model dense"
                )
            kept[path] = info.weight
    for path, weight in kept.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(path, StoredLinear(layer, weight).train(layer.training))

    def fill() -> None:
        natives = model.saved_tensors()
        rest = {name: expr for name, expr in weight_map.items() if name.removesuffix(".weight") not in kept}
        load_parameters({name: natives[name] for name in rest}, rest, reader, progress=True)
        for path, weight in kept.items():
            layer: Any = model.get_submodule(path)
            parts = {}
            for role, info in weight.parts.items():
                parts[role] = torch.empty(info.shape, dtype=info.dtype)
                reader.read_elements(info, parts[role], 0, parts[role].numel())
            try:
                layer.fill(parts)
            except BadScaleError as error:
                raise CheckpointError(f"{reader.folder}: {error}") from error

    return fill


def decode_stored(model: LigerCausalLM) -> None:
    """Replace all layers that keep quantised bits by dense ones, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, StoredLinear):
            model.set_submodule(path, module.as_dense(module.decoded_dtype))
