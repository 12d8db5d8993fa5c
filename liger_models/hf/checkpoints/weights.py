"""Checkpoints through transformers' own loader and writer, by our weight map.

transformers converts a checkpoint tensor by tensor: entries of a mapping say what a name becomes, and an
operation makes the model's tensors from those that were collected for it. Its own entries are patterns, with
operations such as Concatenate, whose reverse cuts equal pieces (wrong with fewer key than query heads). Ours
is one entry for the whole model, made from the model's layouts: it knows every name exactly, and reads and
writes by the expressions, so that reading and writing are each other's inverse.

A `Group` is the smallest set of native tensors and checkpoint tensors that hang together: one packed
projection and its parts, or all parts of a tensor that a checkpoint holds whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, dot_natural_key

from liger_models.convert.checkpoints.expressions import Expr, Ref, write
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import connected
from liger_models.convert.errors import CheckpointError


@dataclass(frozen=True)
class Group:
    """Native tensors, and the checkpoint tensors of which they are made in one layout.

    Attributes:
        layout: the layout.
        natives: their expressions, by name, in the order of names.
        shapes: of the checkpoint tensors, by name, in the order of names.
    """

    layout: Layout
    natives: Mapping[str, Expr]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, layout: Layout, natives: Mapping[str, Expr]) -> Group:
        """The group of these natives and of all that they are made of."""
        shapes = {ref.name: ref.shape for expr in natives.values() for ref in expr.refs()}
        return cls(layout, _in_order(natives), _in_order(shapes))

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The native tensors from the checkpoint's."""
        return {name: expr.read(tensors.__getitem__) for name, expr in self.natives.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint tensors from the native ones."""
        written = write((expr, tensors[name]) for name, expr in self.natives.items())
        return {name: written[name] for name in self.shapes}


class Groups:
    """The groups of a model in each of its layouts. Tensors that no layout changes are in none.

    Args:
        weight_maps: of each layout.
        prefix: what stands before the names of a whole model, and not before those of its base model.
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
        """Those of one layout alone."""
        one = Groups([], self.prefix)
        one._add(layout, self.of_layout[layout])
        return one

    def note(self, name: str) -> None:
        """A checkpoint has a tensor of this name: leave the layouts out that have none."""
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
    """The groups of one of our models in transformers, as its modules are now."""
    weight_maps = [(layout, model.weight_map(layout)) for layout in model.layouts]
    return Groups(weight_maps, f"{model.base_model_prefix}.")


class CheckpointConverter(WeightConverter):
    """The entry of a model in transformers' mapping: from checkpoint to native names, or back."""

    __slots__ = ("backwards", "groups", "pattern")

    def __init__(self, pattern: str, groups: Groups, backwards: bool = False):
        operation = WriteGroups(groups) if backwards else ReadGroups(groups)
        super().__init__([pattern], [pattern], [operation])
        self.pattern, self.groups, self.backwards = pattern, groups, backwards

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """(the first name of the other side of its group, what stands for this entry)."""
        known = self.groups.of_native if self.backwards else self.groups.of_checkpoint
        for prefix in self._prefixes():
            name = source_key.removeprefix(prefix)
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

    def _prefixes(self) -> tuple[str, ...]:
        """What can stand in front of this model's names: of a part, its path in the whole model."""
        if self.scope_prefix is None:
            return "", self.groups.prefix
        base, scope = (f"{part}." if part else "" for part in (self.base_model_prefix, self.scope_prefix))
        return base + scope, scope

    def reverse_transform(self) -> CheckpointConverter:
        return self._with_direction(not self.backwards)

    def __deepcopy__(self, memo: object) -> CheckpointConverter:
        # The loader makes a copy for every tensor that it meets; what the model is made of is shared.
        return self._with_direction(self.backwards)

    def _with_direction(self, backwards: bool) -> CheckpointConverter:
        other = CheckpointConverter(self.pattern, self.groups, backwards)
        other.scope_prefix, other.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return other


class ReadGroups(ConversionOps):
    """The native tensors of a group from those of a checkpoint, which come in the order of their names."""

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
    """The checkpoint tensors of a group from the native ones, which come in the order of their names."""

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
                f"{', '.join(group.natives)}: found tensors of the shapes {found} to save, expected {shapes}"
            )
        written = group.write(dict(zip(group.natives, tensors, strict=True)))
        return {prefix + name: tensor for name, tensor in written.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return ReadGroups(self.groups)


def convert_state_dict(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """A hook in front of `load_state_dict`: a state dict of a checkpoint's names becomes one of native names.

    Trainer resumes with `load_state_dict(what save_pretrained wrote, strict=False)`, which would silently
    leave as it was what is called otherwise. Some tensors have one name on both sides, and the same shape or
    not (gpt-oss' experts lie transposed in checkpoints): what the others are tells what these are.

    Raises:
        CheckpointError: of a packed tensor only some parts are there, or tensors of both kinds beside some
            that may be either.
    """
    given = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    _native, stored = _groups_found(groups_of(model), given)
    for fitting in stored:
        tensors = {name: state_dict.pop(prefix + name) for name in fitting[0].shapes}
        state_dict |= {prefix + name: tensor for name, tensor in fitting[0].read(tensors).items()}


def as_checkpoint(model: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of native names as one of a checkpoint; one of a checkpoint stays as it is.

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
    """(groups that a state dict holds under native names, groups that it holds as a checkpoint does), each in
    the layouts that fit. A group that may be either is what the others are, or native if there are none.
    """
    shapes = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, Tensor)}.items()
    native, stored, either = [], [], []
    for candidates in {id(found[0]): found for found in groups.of_native.values()}.values():
        fitting = [group for group in candidates if group.shapes.items() <= shapes]
        natives = {name: expr.shape for name, expr in candidates[0].natives.items()}
        if natives.items() <= shapes:
            if fitting:
                either.append(fitting)
            else:
                native.append(candidates)
        elif fitting:
            stored.append(fitting)
        elif not any(name in given for name in natives):  # else torch tells of it
            _refuse_parts(candidates, given)
    if native and stored and either:
        ours, theirs, unclear = native[0][0].natives, stored[0][0].shapes, either[0][0].natives
        raise CheckpointError(
            f"the state dict holds {next(iter(ours))} as this model has it, and {next(iter(theirs))} as a "
            f"checkpoint has it, so {next(iter(unclear))} may be either; give all of one kind"
        )
    return (native, stored + either) if stored else (native + either, stored)


def _refuse_parts(candidates: Sequence[Group], given: Mapping[str, Any]) -> None:
    for group in candidates[::-1]:
        found = {name: tuple(given[name].shape) for name in group.shapes if name in given}
        if found:
            raise CheckpointError(
                f"{next(iter(group.natives))} is made of {group.shapes}, but the state dict holds {found}; "
                "give all of them, or none"
            )


def refuse_lost_adapters(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """A hook in front of `load_state_dict`: PEFT passes over what has no place, and an adapter that should do
    something does nothing.

    Raises:
        CheckpointError: a tensor of a LoRA adapter that is not there, such as those of single experts, as
            transformers 4 had them.
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
            )


def _in_order(named: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers sorts a state dict."""
    return {name: named[name] for name in sorted(named, key=dot_natural_key)}


def _is_itself(native: str, expr: Expr) -> bool:
    return isinstance(expr, Ref) and expr.name == native


def _collected(input_dict: Mapping[str, Any]) -> list[Tensor]:
    (tensors,) = input_dict.values()
    return tensors if isinstance(tensors, list) else [tensors]


def _known(full_name: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """A name in parts: the path of our model in a whole one, and the name that is known."""
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
