"""One layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.attention import (
    AttentionSpec,
    CrossAttentionSpec,
    LatentAttentionSpec,
    SharedAttentionSpec,
)
from liger_models.layers.specs.mlp import MLPSpec, MoESpec, PerLayerInputSpec
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.recurrent import GatedDeltaSpec

Topology = Literal[
    "pre_norm",
    "layer_scale",
    "gated_pre_norm",
    "gated_cross",
    "sandwich",
    "scaled_sandwich",
    "scaled_sandwich_with_experts",
    "post_norm",
    "parallel",
    "parallel_two_norms",
]


@dataclass(frozen=True)
class BlockSpec:
    """One layer: its topology (a class of `layers/blocks`) and its parts.

    The types of `mixer` and `mlp` determine their modules. `norm` applies to each of the layer's norms.
    `residual_scale` multiplies each branch before it is added to the residual stream. Some topologies support
    `experts` in addition to the MLP, and a `per_layer_input`.
    """

    mixer: AttentionSpec | SharedAttentionSpec | LatentAttentionSpec | CrossAttentionSpec | GatedDeltaSpec
    mlp: MLPSpec | MoESpec
    norm: NormSpec | LayerNormSpec
    topology: Topology = "pre_norm"
    residual_scale: float = 1.0
    experts: MoESpec | None = None
    per_layer_input: PerLayerInputSpec | None = None

    @property
    def mixture(self) -> MoESpec | None:
        """The layer's experts, in place of an MLP or in addition to it."""
        return self.mlp if isinstance(self.mlp, MoESpec) else self.experts
