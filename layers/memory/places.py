"""Where in a layer's passes its modules and parameters are used. The modules are asked: names differ between
families in transformers, such as `mlp.fc2` and `feed_forward.w2`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from liger_models.layers.blocks import Block
from liger_models.layers.experts.moe import Experts
from liger_models.layers.parts.mlp import GatedMLP, PlainMLP
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.projections.stored_weight import dense_shape
from liger_models.layers.specs import AttentionSpec, MoESpec

PLACES = ("last", "front", "mixer", "output")
"""The MLP's last product and its first ones; the mixer's inputs and attention's output."""


def places_of(layer: nn.Module) -> dict[int, str]:
    """Places of the modules and parameters in a layer's mixers and MLP, by id."""
    places: dict[int, str] = {}

    def put(module: nn.Module, place: str) -> None:
        places.update(dict.fromkeys(map(id, (*module.modules(), *module.parameters())), place))

    own: Any = layer
    for mixer in getattr(own, "mixers", ()):
        put(mixer, "mixer")
        if hasattr(mixer, "o_proj"):
            put(mixer.o_proj, "output")
    if (mlp := getattr(own, "mlp", None)) is not None:
        put(mlp, "front")
        for module in mlp.modules():
            if isinstance(module, GatedMLP | PlainMLP):
                put(module.down_proj, "last")
            elif isinstance(module, Experts):
                stacks = (p for name, p in module.named_parameters() if "down_proj" in name)
                places.update(dict.fromkeys(map(id, stacks), "last"))
    return places


def matrix_elements(layer: Block, frozen: bool = False) -> tuple[int, int, int]:
    """Elements of the (`frozen`) matrices that a token meets: gate and up, the last product, all others."""
    inner = last = rest = 0
    places = places_of(layer)
    for module, name, p in (found for part in (layer, *layer.borrowed) for found in matrices(part)):
        elements = 0 if frozen and p.requires_grad else math.prod(dense_shape(module, name))
        place = places.get(id(p))
        if isinstance(module, Experts):
            elements = elements * module.spec.experts_per_token // module.spec.num_experts
        if place == "last":
            last += elements
        elif place == "front":
            inner += elements
        else:
            rest += elements
    return inner, last, rest


def own_attention(layer: Block) -> AttentionSpec | None:
    """The settings of its attention, if that keeps keys and values of its own."""
    return next((mixer for mixer in layer.spec.mixers if isinstance(mixer, AttentionSpec)), None)


def inner_width(layer: Block) -> int:
    """The width of the input of its MLP's last product, of all experts of a token."""
    spec = layer.spec.mlp
    if not isinstance(spec, MoESpec):
        return 0 if spec is None else spec.intermediate_size
    shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
    return spec.experts_per_token * spec.intermediate_size + shared
