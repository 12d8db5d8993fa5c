"""Models whose config asks for products of rounded operands (layers/projections/ternary.py), of any family
whose layers transformers rounds alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.errors import UnsupportedModelError
from liger_models.convert.quantised.bitnet import is_bitnet, rounds_weights
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, TernarySpec

KEY = "quantization_config"


def asks_for_rounding(raw: Mapping[str, Any]) -> bool:
    """Whether a config asks for products of rounded operands."""
    return is_bitnet(raw.get(KEY))


def with_rounding(
    spec: ModelSpec, settings: Mapping[str, Any], layouts: Sequence[Layout], name: str
) -> ModelSpec:
    """The spec of a model with these settings of BitNet's products.

    transformers replaces each linear layer of a model but its head. Here these are the projections of
    attention and of MLPs, and a scale belongs to each tensor of the checkpoint, so that none may be joined.

    Raises:
        UnsupportedModelError: products that are not supported, or a model with other linear layers.
        ConfigError: a setting has an unknown value.
    """
    rounds = rounds_weights(settings, name)
    others = spec.vision is not None or spec.audio is not None or spec.mtp is not None
    joined = any(layout.whole or layout.joined or layout.permuted for layout in layouts)
    if others or joined or not all(_is_plain(block) for block in spec.blocks):
        raise UnsupportedModelError(
            f"{name}: quantization_config asks for weights of three values, which are supported in language "
            "models of attention and dense MLPs whose checkpoints have separate projections; this model has "
            "other layers. Use a checkpoint without this setting"
        )
    return replace(spec, ternary=TernarySpec(rounds))


def _is_plain(block: BlockSpec) -> bool:
    if block.second_mixer is not None or block.experts is not None or block.per_layer_input is not None:
        return False
    if block.shared is not None or block.streams is not None or block.ngrams is not None:
        return False
    attn, mlp = block.mixer, block.mlp
    plain = isinstance(attn, AttentionSpec) and not attn.clipped and attn.indexer is None
    return plain and isinstance(mlp, MLPSpec) and not mlp.clipped
