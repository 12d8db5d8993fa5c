"""Frozen layers before the first trained parameter: no gradient reaches them, so they keep nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liger_models.layers.memory.layer_costs import LayerCosts


def layers_without_gradient(model: Any) -> int:
    """Number of a decoder's first layers that no gradient reaches."""
    before = [model.embed_tokens, getattr(model, "per_layer_inputs", None), *model.encoders]
    before += [getattr(model, "embed_positions", None), getattr(model, "embed_norm", None)]
    if any(p.requires_grad for module in before if module is not None for p in module.parameters()):
        return 0
    trained = (any(p.requires_grad for p in layer.parameters()) for layer in model.layers)
    return next((number for number, any_trained in enumerate(trained) if any_trained), len(model.layers))


def without_gradient(costs: LayerCosts) -> LayerCosts:
    """Costs of such a layer."""
    nothing = dict.fromkeys(costs.kept, 0)
    return replace(costs, kept=nothing, transient=nothing, work=nothing, own_input=0, own_gradient=0)
