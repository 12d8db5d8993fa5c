"""Renaming of modules to their names in transformers' own model.

    layers.0.mlp.up_proj -> layers.0.mlp.fc1 (Phi)          layers.0.mlp -> layers.0.feed_forward (Llama 4)
    layers.0.per_layer_input.per_layer_projection -> layers.0.per_layer_projection (Gemma 4)

Tools look layers up by name: PEFT's targets and files, quantisation skip lists, hooks. Our blocks use one
set of names for all families. This module moves each submodule to its path in transformers' own model, and
the blocks find it through properties of a generated subclass. Parameters keep their names within modules.

The names come from the family's last layout, that of transformers' modules in memory. If such a name already
means another module in our block (norms of GLM-4), neither module is renamed.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from liger_models.convert.checkpoints.expressions import Expr, Stack
from liger_models.convert.checkpoints.rows import is_one_tensor
from liger_models.convert.checkpoints.weight_map import WeightMap
from liger_models.layers.projections.in_place import change_class, child_table
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import (
    PackedLinear,
    name_parts_as_stored,
    packed_here_alone,
)


def give_names(model: nn.Module, weight_map: Mapping[str, Expr]) -> tuple[dict[str, str], set[str]]:
    """Move the modules of a decoder to their paths in transformers' own model.

    Args:
        model: with our module names.
        weight_map: its tensors as expressions over those of transformers' own model.

    Returns:
        (the new name of each tensor, the paths that mean another module in transformers' own model).
    """
    modules = dict(model.named_modules())
    homes, ambiguous = _homes(modules, weight_map)
    at = {home: modules[path] for path, home in homes.items()}
    children: defaultdict[str, dict[str, nn.Module]] = defaultdict(dict)
    for path, home in homes.items():
        if path:
            (holder, leaf), (parent, name) = _cut(home), _cut(path)
            wired = _join(homes[parent], name)
            within = holder
            while within not in at:  # containers that only transformers' model has
                made = _Around(leaf) if within == wired == holder else Holder()
                at[within] = made.train(model.training)
                above, last = _cut(within)
                children[above][last] = at[within]
                within = above
            children[holder][leaf] = modules[path]
            if wired != home and not (wired == holder and isinstance(at[holder], _Around)):
                shared = _common([homes[parent], holder])
                way = home.removeprefix(f"{shared}." if shared else "")
                _note(modules[parent], name, at[shared], way)
    for home, module in at.items():
        table = child_table(module)
        if list(table.items()) != list(children[home].items()):
            table.clear()
            table.update(children[home])
    names = {}
    for tensor, expr in weight_map.items():
        path, name = _cut(tensor)
        names[tensor] = _join(homes[path], name)
        if isinstance(packed := modules[path], PackedLinear) and name == "weight":
            name_parts_as_stored(packed, expr)
    return names, ambiguous


def by_path(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule that has this path in transformers' own model; None if there is none. A block may
    give one of the names on the way to another module: where one of transformers' layers is two blocks.
    """
    found: nn.Module | None = module
    for step in path.split(".") if path else ():
        found = None if found is None else child_table(found).get(step)
    return found


def move_to_the_top(whole: Any, decoder: Any, head: str) -> None:
    """Move a decoder's modules up to the whole model and the head to this path, for families that
    transformers does not nest in a base model.
    """
    for owner in list(decoder.modules()):
        for name, (start, path) in vars(owner).get("_elsewhere", {}).items():
            if (owner if start is None else start) is decoder:
                owner._elsewhere[name] = (whole, path)
    table, of_whole = child_table(decoder), child_table(whole)
    modules = dict(table)
    table.clear()
    for name, module in modules.items():
        of_whole[name] = module
        if name not in decoder._elsewhere:
            _note(decoder, name, whole, name)
    move_head(whole, head)


def move_head(whole: Any, head: str, name: str = "lm_head") -> None:
    """Move the head of a whole model, or another of its modules, to this path."""
    path, leaf = _cut(head)
    child_table(whole.get_submodule(path))[leaf] = child_table(whole).pop(name)
    _note(whole, name, whole, head)


def hide_matrices(model: nn.Module, weight_map: Mapping[str, Expr]) -> None:
    """Expose weights as plain parameters where transformers does, so that PEFT and quantisers skip them."""
    modules = dict(model.named_modules())
    for tensor, expr in weight_map.items():
        module = modules.get(_cut(tensor)[0])
        if type(module) is Linear and _cut(next(expr.refs()).name)[1] not in ("weight", "bias"):
            change_class(module, Matrix)


class Matrix(nn.Module):
    """Matrix with the forward of `Linear` that tools do not recognise as a linear layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    float8 = ternary = None
    forward = Linear.forward  # type: ignore[assignment]
    whole_bias = Linear.whole_bias  # type: ignore[assignment]

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise as `Linear` does."""
        nn.init.normal_(self.weight, 0.0, std, generator)


def stored_as_one(model: nn.Module, weight_map: WeightMap, other: WeightMap) -> dict[str, list[str]]:
    """Map paths of packed projections that are one layer in `weight_map` (`to_split`), and several in the
    `other`, to the names of these.
    """
    several = packed_here_alone(model, other)
    return {path: [*several[path]] for path in several.keys() - packed_here_alone(model, weight_map).keys()}


def refuse_ambiguous(decoder: Any) -> None:
    """Refuse PEFT layers at ambiguous names.

    Raises:
        ValueError: PEFT has wrapped a module whose name means another one, or none, in transformers.
    """
    for path, parts in decoder.several.items():
        if hasattr(decoder.get_submodule(path), "base_layer"):
            raise ValueError(
                f"{path} is one layer in checkpoints and here, but {', '.join(parts)} in transformers' own "
                "model, which would ignore its adapter. Leave it out, as with exclude_modules=r'.*\\."
                f"{path.rpartition('.')[2]}'"
            )
    for path in decoder.ambiguous:
        module = decoder.get_submodule(path)
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):
            raise ValueError(
                f"{path} names a different module in transformers' own model, which would read a trained "
                "copy of it, or its adapter, into that one; leave it out"
            )


def _homes(
    modules: Mapping[str, nn.Module], weight_map: Mapping[str, Expr]
) -> tuple[dict[str, str], set[str]]:
    """Return (new path of each module, paths that mean another module in transformers' own model)."""
    wishes = _wishes(modules, weight_map)
    ambiguous: set[str] = set()
    while True:
        homes: dict[str, str] = {}
        taken: dict[str, str] = {}
        for path in modules:  # parents before their children
            stays = _join(homes[_cut(path)[0]], _cut(path)[1]) if path else ""
            home = wishes.get(path, stays) if path else ""
            homes[path] = stays if home in taken else home  # its container is then empty
            taken[homes[path]] = path
        hidden = {}  # modules whose new name already means another module in our block
        for path, home in homes.items():
            name = _join(homes[_cut(path)[0]], _cut(path)[1]) if path else ""
            if name != home and name in taken:
                hidden[name] = (path, taken[name])
        if not hidden:
            return homes, ambiguous
        ambiguous |= hidden.keys()
        for pair in hidden.values():
            for path in pair:
                wishes.pop(path, None)


def _wishes(modules: Mapping[str, nn.Module], weight_map: Mapping[str, Expr]) -> dict[str, str]:
    """Find the path in transformers' own model of the module with the same tensors or children."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tensor, expr in weight_map.items():
        path, name = _cut(tensor)
        theirs, their_name = _cut(next(expr.refs()).name)
        if their_name == name:
            if isinstance(expr, Stack):  # per-head norms
                theirs = _common([_cut(ref.name)[0] for ref in expr.refs()])
            elif not is_one_tensor(expr):  # a packed projection goes next to its parts
                parent = _common([_cut(_cut(ref.name)[0])[0] for ref in expr.refs()])
                theirs = _join(parent, _cut(path)[1])
            found[path][theirs] += 1
    holding = set(found)
    wishes: dict[str, str] = {}
    for path in reversed(list(modules)):  # children before their parents
        if path and path in found:
            if path in holding:
                wishes[path] = min(found[path].items(), key=lambda wish: (-wish[1], len(wish[0])))[0]
            else:  # a container goes to the common path of its children
                wishes[path] = _common(found[path])
            if (parent := _cut(path)[0]) not in holding:
                above, name = _cut(wishes[path])
                # transformers' parent has the children of this container itself (the MLP of OPT).
                dissolved = path not in holding and name == _cut(parent)[1]
                found[parent][wishes[path] if dissolved else above] += 1
    return wishes


def _common(paths: Iterable[str]) -> str:
    """Return the longest common parent path."""
    steps = [path.split(".") for path in paths]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*steps, strict=False))
    return ".".join(level[0] for level in shared)


def _note(owner: Any, name: str, start: nn.Module, path: str) -> None:
    """Resolve `owner.name` to the module at this path from `start`, on each access, because tools may wrap
    any module on the way.
    """
    if not isinstance(owner, _Renamed):
        kind: Any = type(owner)
        change_class(owner, _renamed(kind))
    vars(owner).setdefault("_elsewhere", {})  # not set yet on an instance of a renamed class
    owner._elsewhere[name] = (None if start is owner else start, path)
    if name not in vars(type(owner)):
        setattr(type(owner), name, property(functools.partial(_child, name=name)))


class Holder(nn.Module):
    """Container at the path of a module that only transformers' own model has. It is never called.
    Registering a hook on it warns and does not raise, because some tools hook every module.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: a container has no forward."""
        raise NotImplementedError(f"{self._said}; call the model, or one of these")

    @property
    def _said(self) -> str:
        held = ", ".join(child_table(self))
        return f"this module holds {held}, as in transformers' own model, and is never run"

    def _register(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{self._said}, nor are hooks on it: hook one of these", stacklevel=3)
        return getattr(super(), kind)(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register("register_forward_hook", *args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register("register_forward_pre_hook", *args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register("register_full_backward_hook", *args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self._register("register_full_backward_pre_hook", *args, **kwargs)


class LanguageModel(Holder):
    """Language model inside a vision-language model, as `get_decoder` returns it.

    It runs when called directly, on ids or embeddings. A forward of the whole model does not call it.
    """

    @classmethod
    def within(cls, owner: Any) -> None:
        """Make the container of the owner's language layers a `LanguageModel`, unless one of our modules
        has that path.
        """
        holder: Any = child_table(owner).get("language_model")
        if type(holder) is Holder:
            change_class(holder, cls)
            vars(holder)["_owner"] = (owner,)  # a tuple avoids registration as a child module

    @property
    def config(self) -> Any:
        """Config of the language model."""
        return self._whole.config.get_text_config()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the owner's forward."""
        return self._whole(*args, **kwargs)

    @property
    def _said(self) -> str:
        return f"{super()._said} within the whole model"

    @property
    def _whole(self) -> Any:
        (owner,) = vars(self)["_owner"]
        return owner


class _Around(nn.Module):
    """Forwards to a module that transformers' own model nests in another one, at the name our block uses."""

    def __init__(self, leaf: str):
        super().__init__()
        self._leaf = leaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return child_table(self)[self._leaf](*args, **kwargs)


class _Renamed:
    """Mixin of a module with children that are renamed or moved.

    Attributes:
        _elsewhere: our name -> (start module, or None for this one; path from it).
    """

    _elsewhere: dict[str, tuple[nn.Module | None, str]]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in vars(self).get("_elsewhere", ()):
            start, path = self._elsewhere[name]
            holder, leaf = _cut(path)
            child_table(_at(self if start is None else start, holder))[leaf] = value
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle with the plain class, which is importable by name."""
        if not vars(type(self)).get("_is_made"):
            return super().__reduce_ex__(protocol)
        return _empty, (type(self).__mro__[2],), vars(self)


@functools.cache
def _renamed(kind: Any) -> Any:
    fields = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Renamed, kind), {**fields, "_is_made": True})


def _empty(kind: Any) -> Any:
    made = _renamed(kind)
    return made.__new__(made)


def _child(module: Any, name: str) -> Any:
    if name in vars(module):  # may be None: this block lacks the part
        return vars(module)[name]
    start, path = vars(module).get("_elsewhere", {}).get(name, (None, name))
    return _at(module if start is None else start, path)


def _at(module: Any, path: str) -> Any:
    for step in path.split(".") if path else ():
        if step in child_table(module):
            module = child_table(module)[step]
        elif isinstance(module, _Renamed):
            raise AttributeError(step)
        else:  # a wrapper forwards to ours: PEFT's to the copy that is trained
            module = getattr(module, step)
    return module


def _cut(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition(".")
    return parent, name


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def to_split(model: Any) -> WeightMap:
    """The weight map by which projections are split: that of the modules of transformers' own model. Where
    these are several of another order of rows than one layer in checkpoints (Kimi K2.5), that of the
    checkpoint, which leaves the layer whole.
    """
    weight_map, own = model.weight_map(), model.weight_map(model.base_decoder.own_layout)
    if packed_here_alone(model, own).keys() == packed_here_alone(model, weight_map).keys():
        return weight_map
    moved = any("_proj." in pattern for pattern, _ in model.architecture.modules_layout.permuted)
    return weight_map if moved else own
