"""Memory of the encoders of images and sounds in a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.pictures import NOTHING, Edges, Shown, edges_of
from liger_models.layers.memory.sounds import edges_of_sounds
from liger_models.layers.memory.step import Step
from liger_models.layers.specs import AudioSpec


class EncoderCosts(NamedTuple):
    """Memory of an encoder for the inputs of a step.

    Attributes:
        part: the encoder with its projector.
        layers: costs of each layer; empty without inputs.
        edges: bytes kept outside of the layers.
        trains: whether the encoder is trained.
    """

    part: Any
    layers: list[LayerCosts]
    edges: Edges
    trains: bool


def trains(part: Any) -> tuple[bool, bool]:
    """Whether an encoder is trained, and whether its projector is."""
    encoder = {id(p): p for p in part.encoder.parameters()}
    way = {id(p): p for module in part.ways_out() for p in module.parameters()}
    inner, outer = sorted((encoder, way), key=len)  # in transformers' own model one may be within the other
    outer = {key: p for key, p in outer.items() if key not in inner}
    encoder, way = (inner, outer) if inner is encoder else (outer, inner)
    return any(p.requires_grad for p in encoder.values()), any(p.requires_grad for p in way.values())


def costs_of(
    part: Any, step: Step, trained: tuple[bool, bool], hidden_size: int, dtype: torch.dtype
) -> EncoderCosts:
    """Costs of a part of a model, `trained` as `trains` says."""
    shown = inputs_of(part, step)
    if not shown.tokens:
        return EncoderCosts(part, [], Edges(), trained[0])
    edges = edges_of_sounds if isinstance(part.spec, AudioSpec) else edges_of
    return EncoderCosts(
        part,
        list(_layers(part, step, shown, dtype.itemsize)),
        edges(part.spec, shown, hidden_size, dtype, trained),
        trained[0],
    )


def inputs_of(part: Any, step: Step) -> Shown:
    """Sizes of the images or sounds of a step, for their encoder."""
    return step.heard if isinstance(part.spec, AudioSpec) else step.shown


def _layers(part: Any, step: Step, shown: Shown, itemsize: int) -> Iterator[LayerCosts]:
    known: dict[Any, LayerCosts] = {}
    windowed = getattr(part.spec, "windowed", ())
    merges_after = getattr(part.spec, "merges_after", None)
    # Every rank has all images and sounds.
    step = replace(step, batch=1, seq=shown.tokens, shown=NOTHING, heard=NOTHING, sequence_ranks=1)
    step = replace(step, places=shown.places, axes=shown.axes)
    for number, layer in enumerate(part.encoder.layers):
        if merges_after is not None and number == merges_after + 1:
            shown = replace(shown, longest=shown.longest_merged)
            step = replace(step, seq=shown.merged, places=0, axes=0)
        longest = shown.window if number in windowed else shown.longest
        if (layer.spec, longest) not in known:
            known[layer.spec, longest] = LayerCosts.of(layer, replace(step, longest=longest), itemsize)
        yield known[layer.spec, longest]
