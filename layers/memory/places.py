"""Where in a layer's passes its modules and parameters are used. The modules are asked: names differ between
families in transformers, such as `mlp.fc2` and `feed_forward.w2`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_models.layers.experts.moe import Experts
from liger_models.layers.parts.mlp import GatedMLP, PlainMLP

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
