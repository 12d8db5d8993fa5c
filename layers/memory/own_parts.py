"""Sizes of parameters: this process's part, the gathered tensor, and matrices in quantised bits; of image
features in layers that read them; and of residual streams outside of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import local_tensor
from liger_models.layers.attention.cross_attention import CrossAttention
from liger_models.layers.blocks import Block
from liger_models.layers.grids.grid_attention import GridAttention
from liger_models.layers.memory.places import PLACES, places_of
from liger_models.layers.memory.planned import Planned
from liger_models.layers.memory.step import Step
from liger_models.layers.parts.altup import AltUpEnds
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.projections.stored_weight import dense_shape, kept_weights
from liger_models.layers.projections.ternary import rounded_bytes


def own_bytes(p: Tensor) -> int:
    """Bytes of this process's part."""
    return local_tensor(p).nbytes


def own_elements(p: Tensor) -> int:
    """Elements of this process's part."""
    return local_tensor(p).numel()


def gathered_bytes(p: Tensor) -> int:
    """Bytes of a parameter gathered for use. Experts sharded by expert parallelism are never gathered beyond
    this process's experts.
    """
    mesh: Any = getattr(p, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "experts" not in names:
        return p.nbytes
    return 0 if len(names) == 1 else p.nbytes // mesh.size(names.index("experts"))


def whole_bytes(p: Tensor) -> int:
    """Bytes of a gradient when computed: in full for gathered parameters, else this process's part."""
    return max(gathered_bytes(p), own_bytes(p))


def linear_matrices(modules: Iterable[nn.Module]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The matrices of linear layers, each once, with their shapes, as if none were in quantised bits."""
    every = (found for module in modules for found in matrices(module))
    found = {id(p): (p, dense_shape(module, name)) for module, name, p in every if p.ndim == 2}
    return list(found.values())


def largest_part(modules: Iterable[nn.Module]) -> int:
    """Bytes of the largest matrix of linear layers, once packed projections are split."""
    found = [0]
    for owner, name, p in (item for module in modules for item in matrices(module)):
        rows, *columns = dense_shape(owner, name)
        if len(columns) == 1:
            height = max(getattr(owner, "parts", {}).values(), default=rows)
            found.append(p.itemsize * height * columns[0])
    return max(found)


def decoded_bytes(layer: nn.Module, itemsize: int) -> dict[str, int]:
    """Bytes of the largest matrix in quantised bits, or stack of experts' matrices, once it is decoded, of a
    stack's copy in float8, or of a matrix rounded for its product, by its place in the layer.
    """
    places, most = places_of(layer), dict.fromkeys(PLACES, 0)
    for module in layer.modules():
        for name, kept in kept_weights(module).items():
            place = places.get(id(module.get_parameter(name)), "mixer")
            most[place] = max(most[place], itemsize * math.prod(kept.shape))
        for name, copied in getattr(module, "float8_copies", {}).items():
            place = places.get(id(module.get_parameter(name)), "mixer")
            most[place] = max(most[place], copied)
        if rounded := rounded_bytes(module, itemsize):
            place = places.get(id(module.get_parameter("weight")), "mixer")
            most[place] = max(most[place], rounded)
    return most


def before_output(mixer: Any) -> Iterable[Tensor]:
    """The parameters of a mixer whose gradients come after that of its output projection."""
    output = getattr(mixer, "o_proj", getattr(mixer, "out_proj", None))
    last = set() if output is None else set(map(id, output.parameters()))
    return (p for p in mixer.parameters() if id(p) not in last)


def gradient_bytes(parameters: Iterable[Tensor], step: Step) -> int:
    """Bytes of gradients as computed, before they are reduced to shards."""
    return 0 if step.lora_rank else sum(whole_bytes(p) for p in parameters if p.requires_grad)


def kept_of_images(layer: Block, step: Step, itemsize: int) -> int:
    """Bytes that a layer reading image features keeps for them and for the mask of visible features; or what
    a layer of an encoder over grids of patches keeps more, or less, than for images of the usual size.
    """
    for grid in layer.mixers:
        if isinstance(grid, GridAttention) and step.axes:
            return grid.more_bytes(step.tokens, step.places, step.axes, itemsize)
    mixer = next((mixer for mixer in layer.mixers if isinstance(mixer, CrossAttention)), None)
    if mixer is None or not step.shown.read:
        return 0
    visible = itemsize * step.tokens * (step.shown.read // step.batch)
    return visible + step.shown.read * mixer.image_bytes(itemsize)


@dataclass(frozen=True)
class StreamCosts:
    """Bytes of all tokens where projections of the embedding make several residual streams, and others end
    them (layers/parts/altup.py); none without these.

    Attributes:
        first: kept for the first streams during the whole step.
        at_loss: kept for the last streams until the loss is done, and the final norm's input and output.
        at_end: kept for the last streams and needed in the backward pass of their end.
    """

    first: int = 0
    at_loss: int = 0
    at_end: int = 0

    @staticmethod
    def of(model: Planned, step: Step, itemsize: int, idle: int) -> StreamCosts:
        """Costs of a step, whose first `idle` layers receive no gradient."""
        ends = model.stream_ends
        if not isinstance(ends, AltUpEnds):
            return StreamCosts()
        first, last, transient = (step.tokens * size for size in ends.activation_bytes(itemsize))
        first = 0 if idle or step.lora_rank else first
        streams = 2 * step.tokens * itemsize * model.spec.hidden_size
        return StreamCosts(first, last + streams, last + transient)
