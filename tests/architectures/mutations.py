"""Faults derived from a family's spec and checkpoint: other values for every field of the spec, layer by
layer; swapped tensors of the checkpoint; missing norms, residual streams and branches.

No fault is specific to a family: they are found in the spec's dataclasses, in the weight map, in the module
tree, and among the additions of a forward pass.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from pairs import (
    BOUND,
    Pair,
    copy_parameters,
    map_like,
    relative_distance,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes
from liger_models.convert.errors import DataError
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import CrossAttentionSpec, ModelSpec

Path = tuple[str | int, ...]

# Fields whose faults change neither logits nor loss, and where they are tested.
WITHOUT_EFFECT = {
    "ModelSpec.initializer_range": "concerns only fresh weights",
    "ModelSpec.fresh": "the same: test_fresh_weights.py",
    "ModelSpec.padding_idx": "concerns the gradient of one row alone: test_parity.py",
    "ModelSpec.embed_dropout": "acts in training alone: test_dropout.py",
    "BlockSpec.dropout": "the same",
    "BlockSpec.initial_scale": "concerns fresh weights alone",
    "AttentionSpec.dropout": "the same",
    "ModelSpec.padding_has_positions": "concerns padded rows alone: test_parity.py",
    "MoESpec.float32_router": "float32 rounds nothing: tests/layers/experts/test_moe.py",
    "IndexerSpec.scale": "scales scores, of which the order counts: test_latent_attention.py",
    "IndexerSpec.float32_weights": "float32 rounds nothing: tests/layers/attention/test_latent_attention.py",
    "ModelSpec.float32_head": "the same: tests/layers/model/test_causal_lm.py",
    "MoESpec.group_score": "concerns experts in groups alone",
    "MoESpec.renormalize_eps": "concerns small scores alone: tests/kernels/experts/test_moe_routing.py",
    "MoESpec.input_noise": "acts in training alone: tests/architectures/test_phimoe.py",
    "NormSpec.cast": "float32 rounds nothing: test_rounding.py",
    "ModelSpec.round_embed_scale": "the same: test_falcon_h1.py",
    "SSDSpec.norm_cast": "the same: test_falcon_h1.py",
    "GatedDeltaSpec.norm_cast": "the same: test_rounding.py",
    "NormSpec.float32_stream": "the same: test_mamba2.py",
    "VisionSpec.unsaid": "concerns the tokens that training data marks as learned: test_patch_windows.py",
}
OF_IMAGES = (
    "RopeSpec.axes",
    "RopeSpec.frequencies",
    "RopeSpec.halves",
    "AttentionSpec.bidirectional_spans",
    "SharedAttentionSpec.bidirectional_spans",
    "AttentionSpec.whole_spans",
    "ModelSpec.vision",
    "ModelSpec.extra_ids",
    *(f"CrossAttentionSpec.{field.name}" for field in fields(CrossAttentionSpec)),
)
"""Fields that concern images. Like the vision encoder's fields, they are tested in tests/vision."""


def name_of(path: Path) -> str:
    return ".".join(map(str, path))


# -- fields of the spec


def spec_fields(spec: Any, path: Path = ()) -> Iterator[tuple[Path, str, Any, Any]]:
    """(path, "Class.field", value, type) of every field of a spec and of its parts."""
    hints = _hints(type(spec))
    for field in fields(spec):
        value, here = getattr(spec, field.name), (*path, field.name)
        parts = list(enumerate(value)) if isinstance(value, tuple) else []
        if parts and is_dataclass(parts[0][1]):
            for i, part in parts:
                yield from spec_fields(part, (*here, i))
            continue
        yield here, f"{type(spec).__name__}.{field.name}", value, hints[field.name]
        if is_dataclass(value):
            yield from spec_fields(value, here)


_hints = functools.cache(typing.get_type_hints)


def other_values(value: Any, hint: Any) -> list[Any]:
    """Values that a faulty reading might give: a nearby one, the other choices, None."""
    kinds = _kinds(hint)
    nothing = [None] if type(None) in kinds and value is not None else []
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
    ]
    if value in choices:
        return [choice for choice in choices if choice != value] + nothing
    if isinstance(value, bool):
        return [not value, *nothing]
    if isinstance(value, int):
        return [value + 1, *([value - 1] if value > 1 else []), *nothing]
    if isinstance(value, float):
        return [value + 0.01 * max(abs(value), 0.1), *nothing]  # adds 1e-3 to an eps of 1e-5
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return [(value[0] * 1.5, *value[1:]), (*value[:-1], value[-1] * 1.5), *nothing]
    if value == () or (isinstance(value, tuple) and isinstance(value[0], int)):
        return [(value[0] + 1, *value[1:]) if value else (0,)]
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return [value[:-1]]
    if value is None:
        parts = [kind for kind in kinds if is_dataclass(kind)]
        if parts:
            return [_made(kind) for kind in parts]
        return [2] if int in kinds else [0.5] if float in kinds else _choices(hint)
    return nothing


def _made(kind: Any) -> Any:
    """An object of a dataclass, whose fields without a default are 4 or made in the same way; of several
    dataclasses, the first.
    """
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    parts = [[part for part in _kinds(_hints(kind)[name]) if is_dataclass(part)] for name in needed]
    return kind(*(_made(of_field[0]) if of_field else 4 for of_field in parts))


def _choices(hint: Any) -> list[Any]:
    literals = [kind for kind in _kinds(hint) if typing.get_origin(kind) is Literal]
    return [choice for literal in literals for choice in typing.get_args(literal)]


def _kinds(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(kind for part in typing.get_args(hint) for kind in _kinds(part)) if union else (hint,)


def with_value(spec: Any, path: Path, value: Any) -> Any:
    """A copy of a spec with another value at `path`."""
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        return tuple(
            with_value(part, tuple(rest), value) if i == first else part for i, part in enumerate(spec)
        )
    return replace(spec, **{first: with_value(getattr(spec, first), tuple(rest), value)})


def at(spec: Any, path: Path) -> Any:
    """Return the value at a path."""
    for step in path:
        spec = spec[step] if isinstance(step, int) else getattr(spec, step)
    return spec


def unnoticed_fields(
    pair: Pair,
    wanted: Mapping[str, Set[Any]] | None = None,
    of_images: bool = False,
    skip: Set[str] = frozenset(),
    tried: Set[Any] | None = None,
    by_others: Set[Any] = frozenset(),
) -> dict[str, str]:
    """List the changes that the comparison does not notice, as "path: value -> other", by "Class.field".
    Tries all fields in all layers, or the `wanted` ones, each in the first layer that has it with a value
    other than the given ones. Equal parts at the same place of their layers are tried once. With `tried`, so
    are fields of one form (`form_at`), and none of these forms. `of_images`: only fields that concern images.
    `by_others`: forms that are left to other families.
    """
    missed = {}
    elsewhere: dict[str, list[Any]] = {}  # the values of a field in all layers
    for path, field, value, _ in spec_fields(pair.ours.spec):
        if (path[0] == "vision") == of_images:
            elsewhere.setdefault(field, []).append(value)
    key, done = (part_at, set()) if tried is None else (form_at, set(tried))
    for path, field, value, hint in spec_fields(pair.ours.spec):
        if (part := key(pair.ours.spec, path)) is not None:
            if part in done:
                continue
            done.add(part)
        if by_others and form_at(pair.ours.spec, path) in by_others:
            continue
        if (field in OF_IMAGES or path[0] == "vision") != of_images or field in skip | WITHOUT_EFFECT.keys():
            continue
        if field == "QKNormSpec.before_rope" and at(pair.ours.spec, path[:-2]).rope is None:
            continue  # without rotation the order has no effect
        spec = pair.ours.spec
        added = spec.sinusoidal_positions or spec.learned_positions is not None
        if field == "ModelSpec.unused_positions" and not added:
            continue  # no positions are added
        if field == "ModelSpec.zero_position" and not spec.sinusoidal_positions:
            continue  # the same
        if field == "AttentionSpec.bidirectional_spans" and not at(pair.ours.spec, path[:-1]).causal:
            continue  # every token attends to all others
        if field == "AttentionSpec.whole_spans" and at(pair.ours.spec, path[:-1]).window is None:
            continue  # without a window no span is cut
        if field == "FractionTable.divided":
            continue  # of a few sizes alone: tests/vision/test_canvas.py
        if wanted is not None:
            if field not in wanted or value in wanted[field]:
                continue
            wanted = {name: values for name, values in wanted.items() if name != field}
        others = other_values(value, hint) if field != "ModelSpec.vision" else [None]
        if field == "AttentionSpec.slopes" and value is None:
            others = [(0.5,) * at(pair.ours.spec, path[:-1]).num_attention_heads]
        others += [other for other in elsewhere.get(field, ()) if other != value and other not in others][:1]
        for other in others:
            if not spec_is_noticed(pair, with_value(pair.ours.spec, path, other)):
                missed[f"{name_of(path)}: {value!r} -> {other!r}"] = field
        if not others and not is_dataclass(value) and len(_choices(hint)) != 1:
            missed[f"{name_of(path)}: {value!r}"] = field  # there is no other value to try
    return missed


def part_at(spec: ModelSpec, path: Path) -> Any:
    """Key of a field shared by equal parts, such as the norms of two layers: the part, its place, and the
    kind of its layers; None outside of layers.
    """
    place = next((i for i, step in enumerate(path) if isinstance(step, int)), None)
    if place is None or path[place - 1] != "blocks":
        return None
    layer = at(spec, path[: place + 1])
    if place > 1:  # encoder layers have little effect each: only the first of equal ones
        return path[:place], path[place + 1 :], layer
    own = len(path) == place + 2  # a field of the layer itself, whose other parts may differ
    return path[:place], path[place + 1 :], at(spec, path if own else path[:-1]), type(layer)


def form_at(spec: ModelSpec, path: Path) -> Any:
    """Key of a field that parts of a kind share, at a place of layers of a kind, if it is alike in them: the
    same choice, a number that is zero or not, a part of the same kind.
    """
    layers = [at(spec, path[: i + 1]) for i, step in enumerate(path) if isinstance(step, int)]
    names = tuple(step for step in path if isinstance(step, str))
    return names, type(at(spec, path[:-1])), *map(type, layers), _form(at(spec, path))


def _form(value: Any) -> Any:
    if isinstance(value, tuple):
        return bool(value)
    if is_dataclass(value):
        return type(value)
    return bool(value) if isinstance(value, int | float) else value


def spec_is_noticed(pair: Pair, spec: ModelSpec) -> bool:
    """Whether the comparison notices a model of this spec, with the reference's parameters."""
    try:
        model = CausalLM(spec).train(pair.ours.training)
        # A checkpoint with other names or shapes is refused: `map_like` and `read` raise as loading does.
        weight_map = map_like(pair.architecture, model, checkpoint_shapes(pair.weight_map).keys())
        copy_parameters(weight_map, model, pair.state)
        return is_noticed(pair, model)
    except (ValueError, TypeError, RuntimeError, IndexError, DataError):  # also for sizes that do not match
        return True


def is_noticed(pair: Pair, model: Any = None) -> bool:
    """Whether the logits or the loss differ from the reference's. A router's loss changes only the latter."""
    batch, logits, loss = pair.probe
    with torch.no_grad():
        output = (model or pair.ours)(**batch, return_logits=True)
    if output.logits.shape != logits.shape:
        return True
    distances = relative_distance(output.logits, logits), relative_distance(output.loss, loss)
    return not max(distances) <= BOUND


# -- swapped tensors


def swaps(pair: Pair) -> Iterator[tuple[str, str]]:
    """Pairs of canonical names of tensors of equal shape: neighbours within a native tensor, within a layer's
    module or between layers.
    """
    weight_map = pair.ours.weight_map(Layout())
    shapes = checkpoint_shapes(weight_map)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for native, expression in weight_map.items():
        for ref in expression.refs():
            layer, rest = _layer_and_rest(ref.name)
            kind = rest.rpartition(".")[2]
            shape = shapes[ref.name]
            for group in (("packed", native), ("within", layer, kind), ("between", rest)):
                groups.setdefault((*group, shape), []).append(ref.name)
    seen = set()
    for names in groups.values():
        for couple in pairwise(names):
            if couple not in seen:
                seen.add(couple)
                yield couple


def _layer_and_rest(name: str) -> tuple[str, str]:
    """The number of a layer in a tensor's name, and the name without it."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return "", name
    return parts[number], ".".join(parts[:number] + parts[number + 1 :])


@contextmanager
def swapped(pair: Pair, first: str, second: str) -> Iterator[None]:
    """Swap two tensors of the native model."""
    memory = memory_by_tensor(pair)

    def exchange() -> None:
        for a, b in zip(memory[first], memory[second], strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

    exchange()
    try:
        yield
    finally:
        exchange()


def memory_by_tensor(pair: Pair) -> dict[str, list[Tensor]]:
    """The native model's memory, as the views that hold each canonical tensor."""
    own = pair.ours.saved_tensors()
    memory: dict[str, list[Tensor]] = {}
    for name, expression in pair.ours.weight_map(Layout()).items():
        for ref, _, _, view in expression.places(own[name].detach()):
            memory.setdefault(ref.name, []).append(view)
    return memory


# -- missing operations


def norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Norm"):
            yield name, module


@contextmanager
def without_norm(module: nn.Module) -> Iterator[list[Tensor]]:
    """Apply the norm's weight without its division; yield a list of the inputs."""
    calls = []

    def skip(x: Tensor, residual: Tensor | None = None) -> Any:
        x = x if residual is None else x + residual
        calls.append(x)
        weight = getattr(module, "weight", None)
        scaled = x if weight is None else x * (weight + getattr(module, "offset", 0.0))
        return scaled if residual is None else (scaled, x)

    module.forward = skip  # type: ignore[assignment]  # of this module only
    try:
        yield calls
    finally:
        del module.forward


class Additions(TorchDispatchMode):
    """Count the additions of two hidden states. Addition number `fault` returns only its first or its second
    term, as if a branch or the residual stream were missing.
    """

    def __init__(self, hidden_size: int, fault: int | None = None, keep: int = 0):
        super().__init__()
        self.hidden_size, self.fault, self.keep, self.count = hidden_size, fault, keep, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        terms = args[:2]
        if function is torch.ops.aten.add.Tensor and all(self._is_hidden(term) for term in terms):
            self.count += 1
            if self.count - 1 == self.fault:
                return terms[self.keep].clone()
        return function(*args, **(kwargs or {}))

    def _is_hidden(self, term: Any) -> bool:
        return isinstance(term, Tensor) and term.dim() >= 2 and term.shape[-1] == self.hidden_size
