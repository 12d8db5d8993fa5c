"""Canonical names of native tensors, and layouts of checkpoints that differ from them.

The module tree uses the names of LLaMA's checkpoint, so a tensor's path is its canonical name. A module that
packs several tensors, such as a packed projection or stacked experts, declares its parts (`canonical_form`).
A family only declares how its checkpoints differ, as `Layout`s:

    Layout(rename=((".router.", ".gate."),), whole=("*.experts.*",))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Permute, Ref, Rows, Shape, Zeros
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import permuted, permuted_piece, piece_of_groups


@dataclass(frozen=True)
class Joined:
    """Projections of one input that a checkpoint stores as one tensor.

        Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="key_value_heads")

    Attributes:
        name: of the checkpoint's module, next to the projections' names. Several names: the joined tensor is
            cut into that many pieces of equal height, the last one less high, as by `torch.chunk`.
        parts: canonical names of the projections, in the checkpoint's order.
        by: an axis named by the module (`canonical_forms`), or the number of groups. Rows are interleaved by
            group: for each key/value head its rows of q_proj, of k_proj and of v_proj. Widths may differ.
            Default: one group, with whole projections one after another.
        within: prefix of the canonical names to which this applies.
        kind: the only tensors that are joined, such as "bias"; the others are apart. Default: all.
    """

    name: str | tuple[str, ...]
    parts: tuple[str, ...]
    by: str | int | None = None
    within: str = ""
    kind: str | None = None


Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Layout:
    """Differences of a checkpoint from the canonical form.

    Attributes:
        rename: (old, new) substrings, replaced in this order to give the checkpoint's names.
        whole: patterns (with `*`) of native names whose tensors the checkpoint stores packed, as we do.
        permuted: (pattern, order) of canonical names whose tensors are stored in another order, such as
            ("*.experts.gate_up_proj", "e h (i 2) -> e (2 i) h"): see `weight_map.permuted`. The order may
            use axes named by the module: "(heads 3 head_dim) h -> (3 heads head_dim) h".
        joined: projections that the checkpoint stores as one tensor.
        root: prefix of every canonical name except the head's.
        parts: (prefix of canonical names, layout of the names after it), such as ("vision.",
            Layout(root="visual.")); only `rename` and `root` of these layouts apply.
        in_layers_with: (module of a layer, renames in layers that have this module), applied before `rename`:
            ("linear_attn", ((".input_layernorm.", ".attention_layer_norm."),)).
        apart: (pattern, names) of native stacks of matrices whose rows are those of several stacks in the
            checkpoint, next to it: ("*.experts.gate_up_proj", ("w1", "v1")). They must be `whole`, too.
        in_two: (canonical name, names of its first and of its last rows, axis): a tensor that the checkpoint
            stores as two. The axis, named by the module, counts the first rows; None: they are half, rounded
            up.
        in_one: number of layers in turn that the checkpoint stores as one, whose modules are then numbered:
            with 2, "layers.5.mlp.up_proj" is stored as "layers.2.mlp.1.up_proj". `rename` applies later.
        absent: patterns of native names of tensors that the checkpoint does not have, and which are zeros. If
            they no longer are, a model is saved in the layout without `absent`.
        of_parts: only the text parts of multimodal checkpoints have this layout. Saved alone, they have the
            family's first.
    """

    rename: Renames = ()
    whole: tuple[str, ...] = ()
    permuted: tuple[tuple[str, str], ...] = ()
    root: str = "model."
    parts: tuple[tuple[str, Layout], ...] = ()
    joined: tuple[Joined, ...] = ()
    in_layers_with: tuple[tuple[str, Renames], ...] = ()
    apart: tuple[tuple[str, tuple[str, ...]], ...] = ()
    in_two: tuple[tuple[str, tuple[str, str], str | None], ...] = ()
    in_one: int = 1
    absent: tuple[str, ...] = ()
    of_parts: bool = False

    def weight_map(self, forms: Mapping[str, Expr]) -> dict[str, Expr]:
        """Convert canonical expressions (`canonical_forms`) to expressions over this layout's tensors.

        Raises:
            ValueError: a tensor cannot be divided as the layout requires.
        """
        shapes = {ref.name: ref.shape for form in forms.values() for ref in form.refs()}
        layout = self._with_layers(shapes)
        return {
            native: Zeros(form.shape)
            if _matches(native, self.absent)
            else layout._whole(Ref(native, form.shape, _axes(form)))
            if _matches(native, self.whole)
            else form.with_refs(
                lambda ref: layout._joined(ref, shapes) or layout._in_two(ref) or layout._tensor(ref)
            )
            for native, form in forms.items()
        }

    def _with_layers(self, names: Iterable[str]) -> Layout:
        """Return the layout of a model with these canonical names, with each layer's renames spelled out."""
        kinds = {
            (name[: name.index(f".{module}.") + 1], renames): None
            for module, renames in self.in_layers_with
            for name in names
            if f".{module}." in name
        }
        whole = tuple((layer + old[1:], layer + new[1:]) for layer, renames in kinds for old, new in renames)
        return replace(self, rename=whole + self.rename, in_layers_with=()) if whole else self

    def name(self, canonical: str) -> str:
        """Return a tensor's name in the checkpoint."""
        for beginning, layout in self.parts:
            if canonical.startswith(beginning):
                return layout.name(canonical.removeprefix(beginning))
        if self.in_one > 1:
            canonical = _LAYER.sub(partial(_numbered, self.in_one), canonical)
        name = canonical if canonical.startswith("lm_head.") else self.root + canonical
        for old, new in self.rename:
            name = name.replace(old, new)
        return name

    @property
    def base_prefix(self) -> str:
        """Prefix of the language model's modules in a model with a head: the first step of the root."""
        return self.root[: self.root.find(".") + 1]

    def of_base(self, prefix: str | None = None) -> Layout:
        """Return the layout of a model without a head, whose names lack a prefix (default: `base_prefix`)."""
        return _OfBase(**vars(self), base=self.base_prefix if prefix is None else prefix)

    def _whole(self, native: Ref) -> Expr:
        for pattern, names in self.apart:
            if fnmatchcase(native.name, pattern):
                stacked, rows, *rest = native.shape
                shape, owner = (stacked, rows // len(names), *rest), native.name.rpartition(".")[0]
                parts = (Ref(f"{owner}.{name}", shape, native.axes) for name in names)
                return Cat(tuple(map(self._tensor, parts)), dim=1)
        return self._tensor(native)

    def _tensor(self, canonical: Ref) -> Expr:
        name = self.name(canonical.name)
        return self._permuted(canonical, name) or Ref(name, canonical.shape)

    def _joined(self, canonical: Ref, shapes: Mapping[str, Shape]) -> Expr | None:
        """Return the expression of a projection that the checkpoint stores joined with others."""
        path, _, kind = canonical.name.rpartition(".")
        for joined in self.joined:
            # The longest that fits: a part may be within a module with a part of the other's name.
            fitting = [part for part in joined.parts if path == part or path.endswith(f".{part}")]
            if not fitting or not path.startswith(joined.within) or joined.kind not in (None, kind):
                continue
            projection = max(fitting, key=len)
            prefix = path.removesuffix(projection)
            stored = (joined.name,) if isinstance(joined.name, str) else joined.name
            names = [f"{prefix}{module}.{kind}" for module in stored]
            name = names[0]
            if missing := [part for part in joined.parts if f"{prefix}{part}.{kind}" not in shapes]:
                raise ValueError(
                    f"{name} should join {', '.join(joined.parts)}, but the model has no {missing[0]}"
                )
            if isinstance(joined.by, str) and joined.by not in canonical.axes:
                raise ValueError(
                    f"{name} is divided by {joined.by!r}, and its module names the axes "
                    f"{', '.join(canonical.axes) or 'none'}"
                )
            groups = canonical.axes[joined.by] if isinstance(joined.by, str) else joined.by or 1
            rows = [shapes[f"{prefix}{part}.{kind}"][0] for part in joined.parts]
            if any(count % groups for count in rows):
                raise ValueError(
                    f"{name}: {joined.parts} of {rows} rows cannot be divided into {groups} groups"
                )
            widths = [count // groups for count in rows]
            piece = joined.parts.index(projection)
            if len(names) > 1:
                start = sum(widths[:piece])
                return self._cut(names, sum(widths), start, start + widths[piece], canonical.shape[1:])
            found = self._permuted(canonical, self.name(name))
            if found is not None:
                if groups > 1 or len(set(widths)) > 1:
                    raise ValueError(f"{name}: pieces in another order must be whole, and equally high")
                return permuted_piece(found, piece, len(widths))
            return piece_of_groups(self.name(name), widths, piece, groups, canonical.shape[1:])
        return None

    def _in_two(self, canonical: Ref) -> Expr | None:
        for name, names, axis in self.in_two:
            if canonical.name == name:
                total, *rest = canonical.shape
                rows = (total + 1) // 2 if axis is None else canonical.axes.get(axis, total)
                parts = zip(names, (rows, total - rows), strict=True)
                return Cat(tuple(Ref(self.name(part), (count, *rest)) for part, count in parts if count))
        return None

    def _permuted(self, canonical: Ref, name: str) -> Permute | None:
        """Return a tensor that is stored in another order, under this name; None: it is not."""
        for pattern, order in self.permuted:
            if fnmatchcase(canonical.name, pattern):
                return permuted(name, canonical.shape, order, **canonical.axes)
        return None

    def _cut(self, names: Sequence[str], rows: int, start: int, stop: int, rest: Shape) -> Expr:
        """Return rows [start, stop) of a tensor that is stored under `names` in equal pieces."""
        height = -(-rows // len(names))
        pieces = []
        for number, name in enumerate(names):
            first, last = number * height, min((number + 1) * height, rows)
            if max(first, start) < min(last, stop):
                stored = Ref(self.name(name), (last - first, *rest))
                pieces.append(Rows(stored, max(first, start) - first, min(last, stop) - first))
        return Cat(tuple(pieces))


_LAYER = re.compile(r"^layers\.(\d+)\.(\w+)")


def _numbered(count: int, found: re.Match[str]) -> str:
    layer, number = divmod(int(found[1]), count)
    return f"layers.{layer}.{found[2]}.{number}"


@dataclass(frozen=True)
class _OfBase(Layout):
    base: str = ""

    def name(self, canonical: str) -> str:
        return super().name(canonical).removeprefix(self.base)


def canonical_forms(model: nn.Module) -> dict[str, Expr]:
    """Return every saved tensor of a model as an expression over canonical names, in the model's order.

    A module may define `canonical_form(path, name)`, the expression of its tensor `name`. The default, and
    the meaning of None, is a `Ref` of the same name. A module's `axes`, such as {"head_dim": 64}, names sizes
    by which layouts divide its tensors and its submodules' tensors.
    """
    forms: dict[str, Expr] = {}
    axes: dict[str, Mapping[str, int]] = {}
    for path, module in model.named_modules():  # parents before their children
        path = plain_path(path)
        axes[path] = {
            **axes.get(path.rpartition(".")[0], {}),
            **axes.get(path, {}),
            **getattr(module, "axes", {}),
        }
    for path, module, name, tensor in _saved(model):
        native = f"{path}.{name}" if path else name
        ask = getattr(module, "canonical_form", None)
        form = None if ask is None else ask(path, name)
        form = Ref(native, shape_of(tensor)) if form is None else form
        named = axes[path]
        forms[native] = form.with_refs(partial(replace, axes=named)) if named else form
    return forms


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by native name; tied tensors appear once."""
    return {f"{path}.{name}" if path else name: tensor for path, _, name, tensor in _saved(model)}


def plain_path(path: str) -> str:
    """Strip the wrapper names of torch's checkpoint wrapper and torch.compile from a module path."""
    return ".".join(step for step in path.split(".") if step not in WRAPPERS)


WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def _saved(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    found: list[tuple[str, nn.Module, str, Tensor]] = []
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        # The tables themselves: torch's iterators over them take ten times as long, which streams notice.
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((path, module, name, tensor))
        for name, buffer in module._buffers.items() if module._buffers else ():
            persistent = name not in module._non_persistent_buffers_set
            if buffer is not None and persistent and id(buffer) not in seen:
                seen.add(id(buffer))
                found.append((path, module, name, buffer))
        if children := module._modules.items():
            stem = f"{path}." if path else ""
            for name, child in children:
                if child is not None:
                    visit(path if name in WRAPPERS else stem + name, child)

    visit("", model)
    return found


def _axes(form: Expr) -> Mapping[str, int]:
    return next(form.refs()).axes


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
