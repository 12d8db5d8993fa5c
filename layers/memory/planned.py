"""The interface of a model to plan for, its layers without gradients, and the search for the largest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from liger_models.layers.blocks import Block
from liger_models.layers.specs import ModelSpec


class Planned(Protocol):
    """Interface of a model to plan for, as implemented by a decoder."""

    spec: ModelSpec
    layers: Sequence[Block]
    embed_tokens: nn.Embedding
    mtp: Any
    stream_ends: Any
    gathered_once: bool

    @property
    def encoders(self) -> list[Any]:
        """The parts that encode images and sounds."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, a tied one once."""


def layers_without_gradient(model: Any) -> int:
    """Number of a decoder's first layers that no gradient reaches. They keep nothing for a backward pass."""
    before = [model.embed_tokens, getattr(model, "per_layer_inputs", None), *model.encoders]
    before += [getattr(model, "embed_positions", None), getattr(model, "embed_norm", None)]
    if any(p.requires_grad for module in before if module is not None for p in module.parameters()):
        return 0
    trained = (any(p.requires_grad for p in layer.parameters()) for layer in model.layers)
    return next((number for number, any_trained in enumerate(trained) if any_trained), len(model.layers))


def largest(fits: Callable[[int], bool], start: int = 1, most: int = 1 << 40) -> int:
    """The largest number up to `most` for which `fits(number)` holds, to within 1/256; 0 if it does not hold
    for `start`. Assumes that it holds for all smaller numbers.
    """
    if not fits(start):
        return 0
    low, high = start, 2 * start
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
