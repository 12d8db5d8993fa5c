"""Checkpoint conversion inside transformers' own loader and writer, driven by our weight map.

transformers converts a checkpoint tensor by tensor: a mapping entry renames a tensor, and an operation builds
the model's tensors from those collected. Its own entries are patterns with operations such as Concatenate,
whose reverse cuts equal pieces (wrong with fewer key than query heads). Ours is one entry for the whole
model, built from its layouts. It lists every name and uses the same expressions to read and to write, so
that each is the inverse of the other.

A `Group` is the smallest connected set of native and checkpoint tensors: a packed projection and its parts,
or all parts of a tensor that a checkpoint stores whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    dot_natural_key,
)

from liger_models.convert.checkpoints.expressions import Expr, Ref, write
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import connected
from liger_models.convert.errors import CheckpointError
from liger_models.hf.checkpoints.renaming import prefixes_of, renamed


@dataclass(frozen=True)
class Group:
    """Native tensors and the checkpoint tensors they are built from in one layout.

    Attributes:
        layout: the layout.
        natives: expressions of the native tensors, sorted by name.
        shapes: shapes of the checkpoint tensors, sorted by name.
    """

    layout: Layout
    natives: Mapping[str, Expr]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, layout: Layout, natives: Mapping[str, Expr]) -> Group:
        """Build the group of these native tensors and their sources."""
        shapes = {ref.name: ref.shape for expr in natives.values() for ref in expr.refs()}
        return cls(layout, _in_order(natives), _in_order(shapes))

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the native tensors from the checkpoint tensors."""
        return {name: expr.read(tensors.__getitem__) for name, expr in self.natives.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the checkpoint tensors from the native tensors."""
        written = write((expr, tensors[name]) for name, expr in self.natives.items())
        return {name: written[name] for name in self.shapes}


class Groups:
    """Groups of a model in each of its layouts, without the tensors that no layout changes.

    Args:
        weight_maps: one for each layout.
        prefix: of the names in a whole model, absent in its base model.
    """

    def __init__(self, weight_maps: Sequence[tuple[Layout, Mapping[str, Expr]]], prefix: str):
        self.prefix = prefix
        changed = {
            name
            for _, weight_map in weight_maps
            for native, expr in weight_map.items()
            if not _is_itself(native, expr)
            for name in (native, *(ref.name for ref in expr.refs()))
        }
        self.layouts = [layout for layout, _ in weight_maps]
        self.of_layout: dict[Layout, list[Group]] = {}
        self.of_checkpoint: dict[str, list[Group]] = {}
        self.of_native: dict[str, list[Group]] = {}
        for layout, weight_map in weight_maps:
            concerned = {
                native: expr
                for native, expr in weight_map.items()
                if native in changed or any(ref.name in changed for ref in expr.refs())
            }
            self._add(layout, [Group.of(layout, natives) for natives in connected(concerned)])

    def in_layout(self, layout: Layout) -> Groups:
        """Return the groups of one layout."""
        one = Groups([], self.prefix)
        one._add(layout, self.of_layout[layout])
        return one

    def note(self, name: str) -> None:
        """Record a tensor name found in a checkpoint, and drop the layouts without it."""
        having = {group.layout for group in self.of_checkpoint[name]}
        self.layouts = [layout for layout in self.layouts if layout in having] or self.layouts

    def _add(self, layout: Layout, groups: list[Group]) -> None:
        self.of_layout[layout] = groups
        for group in groups:
            for name in group.shapes:
                self.of_checkpoint.setdefault(name, []).append(group)
            for name in group.natives:
                self.of_native.setdefault(name, []).append(group)


def groups_of(model: Any) -> Groups:
    """Build the groups of a model from its current modules."""
    weight_maps = [(layout, model.weight_map(layout)) for layout in model.layouts]
    return Groups(weight_maps, f"{model.base_model_prefix}.")


class CheckpointConverter(WeightConverter):
    """Entry of a model in transformers' mapping, from checkpoint to native names or back.

    In a `quantised` model it passes over tensors that are only renamed: see renaming.py.
    """

    __slots__ = ("backwards", "groups", "pattern", "quantised")

    def __init__(self, pattern: str, groups: Groups, backwards: bool = False, quantised: bool = False):
        operation = WriteGroups(groups) if backwards else ReadGroups(groups)
        super().__init__([pattern], [pattern], [operation])
        self.pattern, self.groups, self.backwards, self.quantised = pattern, groups, backwards, quantised

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return (the first target name of the key's group, the pattern that identifies this entry)."""
        known = self.groups.of_native if self.backwards else self.groups.of_checkpoint
        for prefix in prefixes_of(self, self.groups):
            name = source_key.removeprefix(prefix)
            if self.quantised and renamed(self.groups, name, self.backwards) is not None:
                continue
            if source_key.startswith(prefix) and name in known:
                self._was_used = True
                if not self.backwards:
                    self.groups.note(name)
                group = known[name][0]
                return prefix + next(iter(group.shapes if self.backwards else group.natives)), self.pattern
        if (
            name := f"{self.groups.prefix}{source_key}"
        ) in known and not self.backwards:  # a checkpoint of the base model
            self._was_used = True
            return next(iter(known[name][0].natives)), self.pattern
        return source_key, None

    def reverse_transform(self) -> CheckpointConverter:
        return self._with_direction(not self.backwards)

    def __deepcopy__(self, memo: object) -> CheckpointConverter:
        # The loader copies this entry for every tensor; the copies share the groups.
        return self._with_direction(self.backwards)

    def _with_direction(self, backwards: bool) -> CheckpointConverter:
        other = CheckpointConverter(self.pattern, self.groups, backwards, self.quantised)
        other.scope_prefix, other.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return other


class ReadGroups(ConversionOps):
    """Convert the checkpoint tensors of a group, given in name order, to native tensors."""

    def __init__(self, groups: Groups):
        self.groups = groups

    def __deepcopy__(self, memo: object) -> ReadGroups:
        return self

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        tensors = _collected(input_dict)
        prefix, name = _known(full_layer_name, self.groups.of_native)
        candidates = self.groups.of_native[name]
        found = [tuple(tensor.shape) for tensor in tensors]
        fitting = [group for group in candidates if list(group.shapes.values()) == found]
        if not fitting:
            raise CheckpointError(_misfit(full_layer_name, candidates, found))
        fitting = [group for group in fitting if group.layout in self.groups.layouts] or fitting
        if hasattr(model, "note_layouts"):
            model.note_layouts([group.layout for group in fitting])
        native = fitting[0].read(dict(zip(fitting[0].shapes, tensors, strict=True)))
        return {prefix + name: tensor for name, tensor in native.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return WriteGroups(self.groups)


class WriteGroups(ConversionOps):
    """Convert the native tensors of a group, given in name order, to checkpoint tensors."""

    def __init__(self, groups: Groups):
        self.groups = groups

    def __deepcopy__(self, memo: object) -> WriteGroups:
        return self

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], *, full_layer_name: str, **others: Any
    ) -> dict[str, Tensor]:
        tensors = _collected(input_dict)
        prefix, name = _known(full_layer_name, self.groups.of_checkpoint)
        group = self.groups.of_checkpoint[name][0]
        shapes = [expr.shape for expr in group.natives.values()]
        if shapes != [tuple(tensor.shape) for tensor in tensors]:
            found = [tuple(tensor.shape) for tensor in tensors]
            raise CheckpointError(
                f"{', '.join(group.natives)}: found {found} to save, expected {shapes}; "
                "quantised layers that have other names in checkpoints cannot be saved; save their adapters"
            )
        written = group.write(dict(zip(group.natives, tensors, strict=True)))
        return {prefix + name: tensor for name, tensor in written.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return ReadGroups(self.groups)


def convert_state_dict(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Convert a state dict from checkpoint to native names: a `load_state_dict` pre-hook.

    Trainer resumes by loading the saved checkpoint with `strict=False`, which would silently skip tensors
    under other names. Some tensors have one name on both sides, with equal or different shapes (gpt-oss
    stores its experts transposed). The other tensors decide which side these belong to.

    Raises:
        CheckpointError: only some parts of a packed tensor are present, or the state dict mixes both kinds
            and has tensors that could be either.
    """
    given = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    _native, stored = _groups_found(groups_of(model), given)
    for fitting in stored:
        tensors = {name: state_dict.pop(prefix + name) for name in fitting[0].shapes}
        state_dict |= {prefix + name: tensor for name, tensor in fitting[0].read(tensors).items()}


def as_checkpoint(model: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict from native to checkpoint names; one with checkpoint names is returned as is.

    Raises:
        CheckpointError: as `convert_state_dict`.
    """
    groups = groups_of(model)
    native, stored = _groups_found(groups, state_dict)
    converted = dict(state_dict)
    if not stored:
        to_write = groups.in_layout(model.layouts[0]).of_native
        for fitting in native:
            group = to_write[next(iter(fitting[0].natives))][0]
            tensors = {name: converted.pop(name) for name in group.natives}
            converted |= group.write(tensors)
    return converted


def _groups_found(groups: Groups, given: Mapping[str, Any]) -> tuple[list[list[Group]], list[list[Group]]]:
    """Return (groups found under native names, groups found under checkpoint names), each in the layouts that
    fit. An ambiguous group follows the others, or is native if there are no others. Tensors that checkpoints
    may lack are zeros in a whole checkpoint alone: an adapter, or another part of a model, leaves them.
    """
    shapes = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, Tensor)}.items()
    native, stored, either, lacking = [], [], [], []
    every = list({id(found[0]): found for found in groups.of_native.values()}.values())
    for candidates in every:
        fitting = [group for group in candidates if group.shapes and group.shapes.items() <= shapes]
        natives = {name: expr.shape for name, expr in candidates[0].natives.items()}
        if natives.items() <= shapes:
            if fitting:
                either.append(fitting)
            else:
                native.append(candidates)
        elif fitting:
            stored.append(fitting)
        elif not any(name in given for name in natives):  # otherwise torch reports it
            _refuse_parts(candidates, given)
            if zeros := [group for group in candidates if not group.shapes]:
                lacking.append(zeros)
    if native and stored and either:
        ours, theirs, unclear = native[0][0].natives, stored[0][0].shapes, either[0][0].natives
        raise CheckpointError(
            f"the state dict holds {next(iter(ours))} as this model has it, and {next(iter(theirs))} as a "
            f"checkpoint has it, so {next(iter(unclear))} may be either; pass all of one kind"
        )
    if stored and len(stored + either + lacking) == len(every):
        stored += lacking
    return (native, stored + either) if stored else (native + either, stored)


def _refuse_parts(candidates: Sequence[Group], given: Mapping[str, Any]) -> None:
    for group in candidates[::-1]:
        found = {name: tuple(given[name].shape) for name in group.shapes if name in given}
        if found:
            raise CheckpointError(
                f"{next(iter(group.natives))} is made of {group.shapes}, but the state dict holds {found}; "
                "pass all of them, or none"
            )


def refuse_lost_adapters(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Refuse LoRA tensors that would not be loaded: a `load_state_dict` pre-hook. PEFT skips tensors without
    a matching parameter, which would leave the adapter without effect.

    Raises:
        CheckpointError: a LoRA tensor has no matching parameter, such as those of single experts from
            transformers 4.
    """
    given = [name for name in state_dict if ".lora_" in name and name.startswith(prefix)]
    if not given:
        return
    own = {name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named}
    for name in (name.removeprefix(prefix) for name in given):
        if name not in own:
            single = re.search(r"\.experts\.\d+\.", name)
            raise CheckpointError(
                f"{name}: the adapter has it, but this model does not"
                + (", whose experts are stacked; liger_models.hf.load_adapter reads it" if single else "")
                + _where_it_is_one(model, name)
            )


def _where_it_is_one(model: Any, name: str) -> str:
    """Why the model lacks a layer that is part of another one here."""
    for path, parts in getattr(model, "base_decoder", model).several.items():
        owner, _, one = path.rpartition(".")
        if any(f"{owner}.{part}." in name for part in parts):
            return (
                f", where {', '.join(parts)} are one layer, {one}: merge the adapter with transformers' own "
                "model, and load that"
            )
    return ""


def _in_order(named: Mapping[str, Any]) -> dict[str, Any]:
    """Sort names as transformers sorts a state dict."""
    return {name: named[name] for name in sorted(named, key=dot_natural_key)}


def _is_itself(native: str, expr: Expr) -> bool:
    return isinstance(expr, Ref) and expr.name == native


def _collected(input_dict: Mapping[str, Any]) -> list[Tensor]:
    (tensors,) = input_dict.values()
    return tensors if isinstance(tensors, list) else [tensors]


def _known(full_name: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Split a name into (path of our model in the whole model, known name)."""
    prefix, name = "", full_name
    while name not in names:
        step, _, name = name.partition(".")
        prefix += f"{step}."
        if not name:
            raise CheckpointError(
                f"{full_name} belongs to no tensor that we pack; expected a name that ends in one of "
                f"{', '.join(sorted(names)[:4])} ..."
            )
    return prefix, name


def _misfit(name: str, groups: Iterable[Group], found: list[tuple[int, ...]]) -> str:
    expected = " or ".join(str(dict(group.shapes)) for group in groups)
    return f"{name} is made of {expected}, but the checkpoint holds tensors of the shapes {found}"
