"""Unused tensors of vision-language checkpoints, which transformers' own model has and our forward ignores.

Examples are the head of a SigLIP tower, the layers of CLIP after the one that LLaVA reads, and the audio
encoder in some Gemma 4 checkpoints. They are read and written with the rest. Our tree holds transformers' own
modules for them, which are never called, so that tools find the names and saved checkpoints are complete.
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
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_models.architectures import Architecture
from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.projections.in_place import change_class, child_table


def own_class(config_class: Any, name: str) -> Any:
    """Return transformers' own class of a family, even while `register` replaces it by ours."""
    home = config_class.__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(home), name)


def own_skeleton(architecture: Architecture, config: Any) -> nn.Module:
    """Build transformers' own model on the meta device."""
    config = copy.deepcopy(config)  # some models modify it
    config._attn_implementation = "eager"  # which all have; it is not called
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"), _parts_of_theirs():
        owner = CONFIG_MAPPING[architecture.reference_of] if architecture.reference_of else type(config)
        return own_class(owner, architecture.reference)(config)


@contextmanager
def _parts_of_theirs() -> Iterator[None]:
    """Make the Auto classes return transformers' own submodels while one of its models is built."""
    mappings = AutoModel._model_mapping, AutoModelForCausalLM._model_mapping
    before = [mapping._extra_content for mapping in mappings]
    for mapping in mappings:
        mapping._extra_content = {}
    try:
        yield
    finally:
        for mapping, own in zip(mappings, before, strict=True):
            mapping._extra_content = own


def own_layout(model: Any, theirs: nn.Module | None) -> Layout:
    """Find the family's layout that uses the names of transformers' own modules.

    Raises:
        UnsupportedModelError: no layout does.
    """
    usual = model.architecture.modules_layout
    if theirs is None:
        return usual
    known = set(theirs.state_dict())
    for layout in model.architecture.layouts:
        if checkpoint_shapes(layout.weight_map(model.forms)).keys() <= known:
            return layout
    difference = sorted(checkpoint_shapes(usual.weight_map(model.forms)).keys() - known)
    raise UnsupportedModelError(
        f"this transformers has other modules in its {type(theirs).__name__} than are known here; it lacks "
        f"{difference[:4]}"
    )


def modules_layout(model: Any) -> Layout:
    """Find the layout with the names of transformers' own modules for one of our native multimodal models,
    which may depend on its encoder: the usual one if transformers lacks the family, or if the model is a
    part of one.
    """
    architecture, raw = model.architecture, model.config.to_dict()
    usual = architecture.modules_layout
    if architecture.model_type not in CONFIG_MAPPING or raw.get("model_type") != architecture.model_type:
        return usual
    known = set(own_skeleton(architecture, AutoConfig.for_model(**raw)).state_dict())
    forms = {name: form for name, form in model.canonical_forms.items() if not name.startswith("mtp.")}
    fitting = (x for x in architecture.layouts if checkpoint_shapes(x.weight_map(forms)).keys() <= known)
    return next(fitting, usual)


def carry_unread(model: Any, theirs: nn.Module) -> None:
    """Add the modules that only transformers' own model has to ours, and record their tensors in
    `model.unread`. Our modules must have transformers' names already.
    """
    prefix = f"{model.base_model_prefix}."
    own = set(checkpoint_shapes(model.own_layout.weight_map(model.forms)))
    own.add(model.own_layout.name("lm_head.weight"))
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items() if name not in own}
    for path, module in _unread_modules(theirs, "", shapes.keys()):
        initializers = _initializers(theirs, path, module)
        model.initializers |= initializers
        _place(model, path.removeprefix(prefix), module)
        if isinstance(module, PreTrainedModel) and not any(b.is_meta for b in module.buffers()):
            initializers[type(module)](module)  # buffers of a part that ours has too
    model.unread = {name.removeprefix(prefix): Ref(name, shape) for name, shape in shapes.items()}


def _initializers(theirs: nn.Module, path: str, module: nn.Module) -> dict[type, Any]:
    """Return initialisers by module type: `_init_weights` of the transformers model that owns the module."""
    steps = path.split(".")
    around = [theirs.get_submodule(".".join(steps[:i])) for i in range(len(steps) + 1)]
    owner = [holder for holder in around if isinstance(holder, PreTrainedModel)][-1]
    alone = copy.copy(owner)  # only its config is used
    vars(alone).update(_modules={}, _parameters={})  # the shallow copy shares the owner's dicts
    return {type(part): functools.partial(type(owner)._init_weights, alone) for part in module.modules()}


def leave_unread(model: Any) -> None:
    """Turn off gradients of unused tensors and of modules that no loss reaches, such as indexers. DDP would
    wait for them, and reduce no gradient; transformers' loader turns them on.
    """
    decoder = model.base_decoder
    holder = model if model.model_at_the_top else decoder  # of the modules of the decoder, by their paths
    for module in holder.modules():
        if getattr(module, "untrained", False):
            for part in _with_moved(module):
                part.requires_grad_(False)
    own = dict(holder.named_parameters())
    for name in decoder.unread.keys() & own.keys():
        own[name].requires_grad_(False)


def _with_moved(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, also those that `give_names` moved out of it."""
    for own in list(module.modules()):
        yield own
        for name in vars(own).get("_elsewhere", ()):
            yield from _with_moved(getattr(own, name))


def unread_in(decoder: Any, layout: Layout) -> dict[str, Ref]:
    """Return the expressions of unused tensors in a layout."""
    return {name: Ref(_name_in(decoder, layout, ref.name), ref.shape) for name, ref in decoder.unread.items()}


def _name_in(decoder: Any, layout: Layout, name: str) -> str:
    for part in ("vision.encoder.", "vision.", "audio.encoder.", "audio."):
        here = decoder.own_layout.name(part)
        if name.startswith(here):
            canonical = part + _canonical(dict(decoder.own_layout.parts).get(part), name.removeprefix(here))
            known = decoder.own_layout.name(canonical) == name
            return layout.name(canonical) if known else layout.name(part) + name.removeprefix(here)
    raise UnsupportedModelError(
        f"transformers' own model has {name}, whose place in checkpoints is not known"
    )


def _canonical(layout: Layout | None, name: str) -> str:
    """The name in a part of a model before the renames of its layout."""
    for old, new in reversed(layout.rename if layout else ()):
        name = name.replace(new, old)
    return name


def _unread_modules(module: nn.Module, path: str, unread: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules, and single tensors, whose saved tensors are all unused."""
    saved = [f"{path}{name}" for name in module.state_dict()]
    if path and saved and all(name in unread for name in saved):
        yield path.removesuffix("."), module
        return
    if any(f"{path}{name}" in unread for name in (*module._parameters, *module._buffers)):
        own = copy.copy(module)
        parameters = {n: p for n, p in module._parameters.items() if f"{path}{n}" in unread}
        buffers = {n: b for n, b in module._buffers.items() if f"{path}{n}" in unread}
        vars(own).update(_modules={}, _parameters=parameters, _buffers=buffers)
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
    for name, parameter in module.named_parameters(recurse=False):  # of a module that ours has too
        holder.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False):
        holder.register_buffer(name, buffer)


def _hide_further(layers: nn.ModuleList) -> None:
    """Hide layers appended after this call from iteration over the list."""
    if type(layers) is nn.ModuleList:
        layers.read = len(layers)  # type: ignore[assignment]
        change_class(layers, ReadLayers)


class ReadLayers(nn.ModuleList):
    """List of layers that iterates over the first `read` only."""

    read: int

    def __len__(self) -> int:
        return self.read

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(child_table(self).values())[: self.read])
