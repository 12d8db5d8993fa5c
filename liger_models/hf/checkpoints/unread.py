"""What transformers' own model of a family that sees has and we have not: tensors that nothing reads.

A SigLIP tower ends in a head that language models pass over, LLaVA reads a layer of CLIP's before the last,
and Gemma 4's checkpoints may hold an encoder of sounds. Such tensors are read and written with the rest, as
modules of transformers' own at their places in our tree, which are never called: what tools look for by name
is there, and a checkpoint goes out whole.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.projections.in_place import change_class, child_table


def own_class(config_class: Any, name: str) -> Any:
    """transformers' own class of a family, also while `register` has put ours in its place."""
    home = config_class.__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(home), name)


def own_skeleton(architecture: Architecture, config: Any) -> nn.Module:
    """transformers' own model, without memory."""
    config = copy.deepcopy(config)  # into which some write
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"), _parts_of_theirs():
        return own_class(type(config), architecture.reference)(config)


@contextmanager
def _parts_of_theirs() -> Iterator[None]:
    """Let transformers' own models be made of its own parts, which they look for in the Auto classes too."""
    mapping = AutoModel._model_mapping
    before, mapping._extra_content = mapping._extra_content, {}
    try:
        yield
    finally:
        mapping._extra_content = before


def own_layout(model: Any, theirs: nn.Module | None) -> Layout:
    """That of a family's layouts which has the names of transformers' own modules.

    Raises:
        UnsupportedModelError: none of them has.
    """
    layouts = model.architecture.layouts
    if theirs is None:
        return layouts[-1]
    known = set(theirs.state_dict())
    for layout in layouts:
        if checkpoint_shapes(layout.weight_map(model.forms)).keys() <= known:
            return layout
    difference = sorted(checkpoint_shapes(layouts[-1].weight_map(model.forms)).keys() - known)
    raise UnsupportedModelError(
        f"this transformers has other modules in its {type(theirs).__name__} than are known here; it lacks "
        f"{difference[:4]}"
    )


def carry_unread(model: Any, theirs: nn.Module) -> None:
    """Put what transformers' own model has beside our tensors into one of ours, whose modules bear the names
    of its own, and note the tensors in `model.unread`.
    """
    prefix = f"{model.base_model_prefix}."
    own = set(checkpoint_shapes(model.own_layout.weight_map(model.forms)))
    own.add(model.own_layout.name("lm_head.weight"))
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items() if name not in own}
    for path, module in _unread_modules(theirs, "", shapes.keys()):
        model.initializers |= _initializers(theirs, path, module)
        _place(model, path.removeprefix(prefix), module)
    model.unread = {name.removeprefix(prefix): Ref(name, shape) for name, shape in shapes.items()}


def _initializers(theirs: nn.Module, path: str, module: nn.Module) -> dict[type, Any]:
    """What initialises modules of theirs, by their types: `_init_weights` of the model that they are in."""
    steps = path.split(".")
    around = [theirs.get_submodule(".".join(steps[:i])) for i in range(len(steps))]
    owner = [holder for holder in around if isinstance(holder, PreTrainedModel)][-1]
    alone = copy.copy(owner)  # its config alone counts
    vars(alone).update(_modules={}, _parameters={})  # of the copy, whose tables are the owner's
    return {type(part): functools.partial(type(owner)._init_weights, alone) for part in module.modules()}


def leave_unread(decoder: Any) -> None:
    """Let what nothing reads need no gradient, for which DDP would wait: transformers' loader says that every
    tensor needs one.
    """
    own = dict(decoder.named_parameters())
    for name in decoder.unread.keys() & own.keys():
        own[name].requires_grad_(False)


def unread_in(decoder: Any, layout: Layout) -> dict[str, Ref]:
    """Where a layout has the tensors that nothing reads."""
    return {name: Ref(_name_in(decoder, layout, ref.name), ref.shape) for name, ref in decoder.unread.items()}


def _name_in(decoder: Any, layout: Layout, name: str) -> str:
    for part in ("vision.encoder.", "vision."):
        here = decoder.own_layout.name(part)
        if name.startswith(here):
            return layout.name(part) + name.removeprefix(here)
    raise UnsupportedModelError(
        f"transformers' own model has {name}, whose place in checkpoints is not known"
    )


def _unread_modules(module: nn.Module, path: str, unread: Any) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules, and tensors of modules, of which all that is saved is unread."""
    saved = [f"{path}{name}" for name in module.state_dict()]
    if path and saved and all(name in unread for name in saved):
        yield path.removesuffix("."), module
        return
    if any(f"{path}{name}" in unread for name in dict(module.named_parameters(recurse=False))):
        own = nn.Module()
        own._parameters = {n: p for n, p in module._parameters.items() if f"{path}{n}" in unread}
        yield path.removesuffix("."), own
    for name, child in module.named_children():
        yield from _unread_modules(child, f"{path}{name}.", unread)


def _place(model: nn.Module, path: str, module: nn.Module) -> None:
    module.requires_grad_(False)
    if torch.empty(()).device.type != "meta":
        module.to_empty(device=torch.empty(()).device)
        for tensor in (*module.parameters(), *module.buffers()):
            nn.init.zeros_(tensor)
    steps, holder = path.split("."), model
    for i, step in enumerate(steps):
        if i == len(steps) - 1 and step not in child_table(holder):
            if isinstance(holder, nn.ModuleList):
                _hide_further(holder)
            child_table(holder)[step] = module
            return
        holder = child_table(holder).setdefault(step, nn.Module())
    for name, parameter in module.named_parameters(recurse=False):  # of a module that is there
        holder.register_parameter(name, parameter)


def _hide_further(layers: nn.ModuleList) -> None:
    """Let what is added to a list from here on be no part of it, for whoever runs through the list."""
    if type(layers) is nn.ModuleList:
        layers.read = len(layers)  # type: ignore[assignment]
        change_class(layers, ReadLayers)


class ReadLayers(nn.ModuleList):
    """A list of layers, of which the first `read` are run."""

    read: int

    def __len__(self) -> int:
        return self.read

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(child_table(self).values())[: self.read])
