"""Modules under the names that transformers' own model gives them.

    layers.0.mlp.up_proj -> layers.0.mlp.fc1 (Phi)          layers.0.mlp -> layers.0.feed_forward (Llama 4)
    layers.0.per_layer_input.per_layer_projection -> layers.0.per_layer_projection (Gemma 4)

Tools look for layers by name: PEFT's targets and files, lists of what is not to be quantised, hooks. Our
parts bear one name in all families, by which the wiring of blocks reads them. Here they are put into the
module tree where transformers' own model has them, and the wiring finds them through properties of a subclass
that is made for the purpose and is else the class itself. Parameters keep the names that they have within
modules.

What transformers' own model has is the family's last layout, that of its modules in memory. Where its name is
what the wiring calls another module (norms of GLM-4), both stay as they are.
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
from liger_models.layers.projections.in_place import change_class, child_table
from liger_models.layers.projections.linear import Linear


def give_names(model: nn.Module, weight_map: Mapping[str, Expr]) -> tuple[dict[str, str], set[str]]:
    """Put the modules of a decoder where those of transformers' own stand.

    Args:
        model: as its wiring has it.
        weight_map: of its tensors, over those of transformers' own.

    Returns:
        (the name that each tensor has now, the paths at which transformers' own has another module).
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
            while within not in at:  # modules of theirs that are none of ours: they hold others
                made = _Around(leaf) if within == wired == holder else Holder()
                at[within] = made.train(model.training)
                above, last = _cut(within)
                children[above][last] = at[within]
                within = above
            children[holder][leaf] = modules[path]
            if wired != home and not isinstance(at[holder], _Around):
                shared = _common([homes[parent], holder])
                way = home.removeprefix(f"{shared}." if shared else "")
                _note(modules[parent], name, at[shared], way)
    for home, module in at.items():
        table = child_table(module)
        if list(table.items()) != list(children[home].items()):
            table.clear()
            table.update(children[home])
    names = {}
    for tensor in weight_map:
        path, name = _cut(tensor)
        names[tensor] = _join(homes[path], name)
    return names, ambiguous


def move_to_the_top(whole: Any, decoder: Any, head: str) -> None:
    """Put the modules of a decoder beside it, and the head at this path, where transformers' own model is
    none within another.
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
    path, leaf = _cut(head)
    child_table(whole.get_submodule(path))[leaf] = of_whole.pop("lm_head")
    _note(whole, "lm_head", whole, head)


def hide_matrices(model: nn.Module, weight_map: Mapping[str, Expr]) -> None:
    """Let what is a parameter of a module in transformers' own model be no linear layer here, which tools
    would adapt or quantise.
    """
    modules = dict(model.named_modules())
    for tensor, expr in weight_map.items():
        module = modules.get(_cut(tensor)[0])
        if type(module) is Linear and _cut(next(expr.refs()).name)[1] not in ("weight", "bias"):
            change_class(module, Matrix)


class Matrix(nn.Module):
    """What `Linear` computes, of a matrix that is not to be taken for a layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    forward = Linear.forward  # type: ignore[assignment]

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """As every matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


def refuse_ambiguous(decoder: Any) -> None:
    """
    Raises:
        ValueError: PEFT has put something around a module whose name means another one in transformers.
    """
    for path in decoder.ambiguous:
        module = decoder.get_submodule(path)
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):
            raise ValueError(
                f"{path} is another module here than in transformers' own model: a trained copy of it, or "
                "its adapter, would be read as another one's; leave it out"
            )


def _homes(
    modules: Mapping[str, nn.Module], weight_map: Mapping[str, Expr]
) -> tuple[dict[str, str], set[str]]:
    """Where each module goes, by its path, and the paths at which transformers' own has another one."""
    wishes = _wishes(modules, weight_map)
    ambiguous: set[str] = set()
    while True:
        homes: dict[str, str] = {}
        taken: dict[str, str] = {}
        for path in modules:  # parents before their children
            stays = _join(homes[_cut(path)[0]], _cut(path)[1]) if path else ""
            home = wishes.get(path, stays) if path else ""
            homes[path] = stays if home in taken else home  # what only holds others holds nothing then
            taken[homes[path]] = path
        hidden = {}  # what would stand at a name by which the wiring reads another module
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
    """Where transformers' own model has a module with these tensors, or with these children."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tensor, expr in weight_map.items():
        path, name = _cut(tensor)
        theirs, their_name = _cut(next(expr.refs()).name)
        if their_name == name:
            if isinstance(expr, Stack):  # the norms of single heads
                theirs = _common([_cut(ref.name)[0] for ref in expr.refs()])
            elif not is_one_tensor(expr):  # a packed projection stands beside its parts
                beside = _common([_cut(_cut(ref.name)[0])[0] for ref in expr.refs()])
                theirs = _join(beside, _cut(path)[1])
            found[path][theirs] += 1
    holding = set(found)
    wishes: dict[str, str] = {}
    for path in reversed(list(modules)):  # children before their parents
        if path and path in found:
            if path in holding:
                wishes[path] = min(found[path].items(), key=lambda wish: (-wish[1], len(wish[0])))[0]
            else:  # what only holds others stands where all of these are
                wishes[path] = _common(found[path])
            if (parent := _cut(path)[0]) not in holding:
                found[parent][_cut(wishes[path])[0]] += 1
    return wishes


def _common(paths: Iterable[str]) -> str:
    """The path within which all of these are."""
    steps = [path.split(".") for path in paths]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*steps, strict=False))
    return ".".join(level[0] for level in shared)


def _note(owner: Any, name: str, start: nn.Module, path: str) -> None:
    """Let `owner.name` be what stands at this path from `start`: tools put modules of their own around any on
    the way.
    """
    if not isinstance(owner, _Renamed):
        kind: Any = type(owner)
        change_class(owner, _renamed(kind))
    vars(owner).setdefault("_elsewhere", {})  # which one made from a renamed class does not have yet
    owner._elsewhere[name] = (None if start is owner else start, path)
    if name not in vars(type(owner)):
        setattr(type(owner), name, property(functools.partial(_child, name=name)))


class Holder(nn.Module):
    """Stands where transformers' own model has a module that ours does without. It holds others and is never
    run: no hook on it would be, of which who puts one there is told. (Some tools put one on every module.)
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            NotImplementedError: always.
        """
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
    """The language model within one that sees, as `get_decoder` returns it.

    It runs when it is called itself, for text or embeddings, and within no call of the whole model.
    """

    @classmethod
    def within(cls, owner: Any) -> None:
        """Turn the module that holds the parts of the owner's language model into one, if none of ours has
        its place.
        """
        holder: Any = child_table(owner).get("language_model")
        if type(holder) is Holder:
            change_class(holder, cls)
            vars(holder)["_owner"] = (owner,)  # in a tuple, or it would become a child of its own child

    @property
    def config(self) -> Any:
        """The config of the text part."""
        return self._whole.config.get_text_config()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's that it is in."""
        return self._whole(*args, **kwargs)

    @property
    def _said(self) -> str:
        return f"{super()._said} within the whole model"

    @property
    def _whole(self) -> Any:
        (owner,) = vars(self)["_owner"]
        return owner


class _Around(nn.Module):
    """Stands where the wiring looks for a module, which transformers' own has within another one."""

    def __init__(self, leaf: str):
        super().__init__()
        self._leaf = leaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return child_table(self)[self._leaf](*args, **kwargs)


class _Renamed:
    """A module some of whose children bear other names, or stand elsewhere.

    Attributes:
        _elsewhere: by the name in the wiring, (from where, if not from this module, the path).
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
        """Pickle looks classes up by their names, under which it finds the plain one."""
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
    if name in vars(module):  # None, where this one has no such part
        return vars(module)[name]
    start, path = vars(module).get("_elsewhere", {}).get(name, (None, name))
    return _at(module if start is None else start, path)


def _at(module: Any, path: str) -> Any:
    for step in path.split(".") if path else ():
        if step in child_table(module):
            module = child_table(module)[step]
        elif isinstance(module, _Renamed):
            raise AttributeError(step)
        else:  # what stands around one of ours gives what that has: in PEFT, of the copy that is trained
            module = getattr(module, step)
    return module


def _cut(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition(".")
    return parent, name


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
