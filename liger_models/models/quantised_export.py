"""Choice of the quantisation of a saved checkpoint: `save_pretrained(quantization=...)`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from liger_models.convert.checkpoints.weight_map import WeightMap, checkpoint_shapes
from liger_models.convert.errors import CheckpointError, ConfigError, UnsupportedModelError
from liger_models.convert.quantised.encoders import TARGETS, AsLoaded, Quantiser
from liger_models.layers.experts.moe import Experts
from liger_models.layers.projections.linear import Linear
from liger_models.models.ternary import packs_weights

AS_LOADED = "as_loaded"


def encoder_of(
    model: Any, quantization: str | None, weight_map: WeightMap | None = None
) -> AbstractContextManager[Any]:
    """Create the encoder of a LigerCausalLM's checkpoint, by default with its own map; None: dense weights,
    or those of three values packed.

    Raises:
        ConfigError: no such format.
        CheckpointError: the checkpoint that the model was read from is not quantised, or unknown.
        UnsupportedModelError: no server reads the family in this format.
    """
    if quantization is None and packs_weights(model.spec):
        quantization = AS_LOADED
    if quantization is None:
        return nullcontext()
    if quantization == AS_LOADED:
        if model.source is None or model.source_folder is None:
            raise CheckpointError(
                "the model was not loaded from its own checkpoint, so there is no format to keep; omit "
                "quantization='as_loaded'"
            )
        return AsLoaded(model.source_folder)
    if quantization not in TARGETS:
        raise ConfigError(
            f"quantization is {quantization!r}; expected {', '.join(map(repr, (AS_LOADED, *TARGETS)))} or "
            "None"
        )
    return _quantiser(model, quantization, model.weight_map() if weight_map is None else weight_map)


def _quantiser(model: Any, kind: str, weight_map: WeightMap) -> Quantiser:
    """The quantiser of the matrices of a model's layers."""
    if model.spec.ternary is not None:
        raise UnsupportedModelError(
            f"quantization is {kind!r}, but this model rounds its weights to three values "
            "(quantization_config), which no server does in this format; omit it"
        )
    target = TARGETS[kind]
    stacked: set[str] = set()
    chosen: set[str] = set()
    for path, module in model.named_modules():
        experts = isinstance(module, Experts)
        if not path.startswith("layers.") or not (experts or isinstance(module, Linear)):
            continue
        for name, _ in module.named_parameters(recurse=False):
            for ref in weight_map[f"{path}.{name}"].refs():
                if len(ref.shape) == 3:
                    stacked.add(ref.name)
                if target.fits(ref.shape):
                    chosen.add(ref.name)
    if stacked and not target.stacked:
        raise UnsupportedModelError(
            f"{model.architecture.model_type}: checkpoints hold all experts of a layer in one tensor, which "
            f"servers do not read in {kind}; expected None{' or mxfp4' if _has_mxfp4(model) else ''}"
        )
    if target.stacked and not _has_mxfp4(model):
        raise UnsupportedModelError(
            f"{model.architecture.model_type}: servers read {kind} only of gpt-oss, whose checkpoints hold "
            "stacked experts with inputs before outputs; expected fp8-block or nvfp4"
        )
    if not chosen:
        raise UnsupportedModelError(
            f"{model.architecture.model_type}: no matrix of its layers has a shape that {kind} divides evenly"
        )
    shapes = checkpoint_shapes(weight_map)
    others = {name for name, shape in shapes.items() if len(shape) > 1 and name not in chosen}
    return Quantiser(kind, chosen, {name for name in others if name.endswith(".weight")})


def _has_mxfp4(model: Any) -> bool:
    """Whether the family stores experts as transformers' reader of MXFP4 expects."""
    orders = {order for layout in model.architecture.layouts for _, order in layout.permuted}
    return "e h (i 2) -> e (2 i) h" in orders
