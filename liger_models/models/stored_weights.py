"""Models that keep the quantised weights of their checkpoint in its bits (docs/quantised.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from liger_models.convert.checkpoints.reading import load_parameters
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.convert.quantised.formats import BadScaleError
from liger_models.convert.quantised.kept import Kept, keep, stored_parts
from liger_models.convert.quantised.reader import ModelReader, as_stored, quantised_weights
from liger_models.layers.experts.moe import Experts
from liger_models.layers.experts.stored_experts import StoredExperts
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.layers.projections.stored_weight import held, kept_weights, part_name
from liger_models.models.causal_lm import LigerCausalLM


def check_can_keep(folder: Path, reader: ModelReader, projections: str, adapter: Any) -> None:
    """Raise ConfigError if a checkpoint's quantised weights cannot be kept with these options."""
    if not reader.is_quantised:
        raise ConfigError(
            f"{folder}: keep_quantised keeps quantised weights, but this checkpoint has none; omit it"
        )
    if projections != "split":
        raise ConfigError(
            f"keep_quantised needs separate projections, found projections={projections!r}; pass 'split'"
        )
    if adapter is not None:
        raise ConfigError("keep_quantised cannot be combined with a checkpoint of adapters; omit one of them")


def keep_stored(model: LigerCausalLM, tensors: Mapping[str, TensorInfo], folder: Path) -> dict[str, Kept]:
    """Give a model on the meta device, with split projections, modules for the weights that a checkpoint has
    quantised.

    Args:
        tensors: of the checkpoint, in dense form.

    Returns:
        The weights in quantised bits, by native name.

    Raises:
        UnsupportedModelError: a quantised weight that cannot be kept: of a head, or experts in different
            formats.
    """
    weights, found = quantised_weights(tensors), {}
    for native, expr in as_stored(model.weight_map(), tensors).items():
        names = [ref.name for ref in expr.refs()]
        quantised = [name for name in names if name in weights]
        if not quantised:
            continue
        path, _, name = native.rpartition(".")
        kept = keep(expr, weights) if len(quantised) == len(names) else None
        module = model.get_submodule(path)
        if kept is None or not _can_hold(module, name):
            weight = weights[quantised[0]]
            raise UnsupportedModelError(
                f"{folder / tensors[quantised[0]].file}: {quantised[0]!r} ({weight.format.label}) cannot be "
                "kept quantised: only linear layers and experts can, whose matrices the checkpoint has one "
                "by one, or stacked, all of a stack in the same format; omit keep_quantised to hold the "
                "model dense"
            )
        found[native] = kept
    by_module: dict[str, dict[str, Kept]] = {}
    for native, kept in found.items():
        path, _, name = native.rpartition(".")
        by_module.setdefault(path, {})[name] = kept
    for path, of_module in by_module.items():
        old = model.get_submodule(path)
        new: nn.Module
        if isinstance(old, Experts):
            new = StoredExperts(old, of_module)
        else:
            assert isinstance(old, nn.Linear)
            new = StoredLinear(old, of_module["weight"])
        model.set_submodule(path, new.train(old.training))
    return found


def fill_stored(model: LigerCausalLM, kept: Mapping[str, Kept], reader: ModelReader) -> None:
    """Read all tensors of a model whose weights `kept` are in quantised bits, once it has memory.

    Raises:
        CheckpointError: as `load_parameters`; or a scale is not finite, or not positive.
    """
    weights = quantised_weights(reader.tensors)
    weight_map = {name: expr for name, expr in model.weight_map().items() if name not in kept}
    for native, weight in kept.items():
        reader.add_parts(*stored_parts(weight, weights))
        weight_map |= {part_name(native, role): expr for role, expr in weight.parts.items()}
    natives = model.saved_tensors()
    load_parameters({name: natives[name] for name in weight_map}, weight_map, reader, progress=True)
    for native, weight in kept.items():
        path, _, name = native.rpartition(".")
        module = model.get_submodule(path)
        try:
            weight.check(held(module, name, weight), _first(module.get_parameter(name)))
        except BadScaleError as error:
            raise CheckpointError(f"{reader.folder}: {error}") from error


def decode_stored(model: LigerCausalLM) -> None:
    """Replace all modules that keep quantised bits by dense ones, in place."""
    for path, module in list(model.named_modules()):
        if kept_weights(module):
            stored: Any = module
            model.set_submodule(path, stored.as_dense())


def _can_hold(module: nn.Module, name: str) -> bool:
    if type(module) is Experts:
        return name in (module.first, "down_proj")
    return type(module) in (nn.Linear, Linear) and name == "weight"


def _first(p: Any) -> int:
    """The first row of this process's part of a parameter."""
    if not is_sharded(p):
        return 0
    (chunk,) = p.__create_chunk_list__()
    return int(chunk.offsets[0])
