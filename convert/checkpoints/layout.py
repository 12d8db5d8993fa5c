"""Names from the module tree: what each native tensor is made of, and how a checkpoint may differ from that.

The module tree is called as LLaMA's checkpoint is, so a tensor's path in it is its canonical name. A module
that packs several tensors into one says so itself (`canonical_form`): a packed projection names its parts,
stacked experts theirs. A family says only in what its checkpoints differ, as `Layout`s:

    Layout(rename=((".router.", ".gate."),), whole=("*.experts.*",))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Expr, Ref, Shape
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import permuted, piece_of_groups


@dataclass(frozen=True)
class Joined:
    """Projections of one input that a checkpoint holds in one tensor.

        Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="key_value_heads")

    Attributes:
        name: of the module that holds the tensor in the checkpoint; it stands where the projections stand.
        parts: the canonical names of the projections, in the checkpoint's order.
        by: an axis that the module names (`canonical_forms`). The tensor's rows lie group by group: for each
            key/value head its rows of q_proj, then those of k_proj and v_proj. Widths may differ. Default:
            one group, each projection as a whole after the one before.
    """

    name: str
    parts: tuple[str, ...]
    by: str | None = None


@dataclass(frozen=True)
class Layout:
    """How a checkpoint differs from the canonical form.

    Attributes:
        rename: (old, new) pieces of the names in the checkpoint, replaced in this order.
        whole: patterns (with `*`) of native names whose tensors the checkpoint holds packed, as we do.
        permuted: (pattern, order) of canonical names whose tensors lie in another order, such as
            ("*.experts.gate_up_proj", "e h (i 2) -> e (2 i) h"): see `weight_map.permuted`. The order may
            use axes that the module names: "(heads 3 head_dim) h -> (3 heads head_dim) h".
        joined: projections that the checkpoint holds in one tensor.
        root: stands in front of every canonical name but those of the head.
        parts: what canonical names begin with whose rest has names of its own, such as ("vision.",
            Layout(root="visual.")): of these layouts `rename` and `root` count.
    """

    rename: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, ...] = ()
    permuted: tuple[tuple[str, str], ...] = ()
    root: str = "model."
    parts: tuple[tuple[str, Layout], ...] = ()
    joined: tuple[Joined, ...] = ()

    def weight_map(self, forms: Mapping[str, Expr]) -> dict[str, Expr]:
        """Expressions over this layout's tensors from canonical ones (`canonical_forms`).

        Raises:
            ValueError: a tensor cannot be divided as the layout says.
        """
        shapes = {ref.name: ref.shape for form in forms.values() for ref in form.refs()}
        return {
            native: self._tensor(Ref(native, form.shape, _axes(form)))
            if _matches(native, self.whole)
            else form.with_refs(lambda ref: self._joined(ref, shapes) or self._tensor(ref))
            for native, form in forms.items()
        }

    def name(self, canonical: str) -> str:
        """What the checkpoint calls a tensor."""
        for beginning, layout in self.parts:
            if canonical.startswith(beginning):
                return layout.name(canonical.removeprefix(beginning))
        name = canonical if canonical.startswith("lm_head.") else self.root + canonical
        for old, new in self.rename:
            name = name.replace(old, new)
        return name

    def _tensor(self, canonical: Ref) -> Expr:
        for pattern, order in self.permuted:
            if fnmatchcase(canonical.name, pattern):
                return permuted(self.name(canonical.name), canonical.shape, order, **canonical.axes)
        return Ref(self.name(canonical.name), canonical.shape)

    def _joined(self, canonical: Ref, shapes: Mapping[str, Shape]) -> Expr | None:
        """The expression of a projection that the checkpoint holds together with others."""
        path, _, kind = canonical.name.rpartition(".")
        owner, _, projection = path.rpartition(".")
        beside = f"{owner}." if owner else ""
        for joined in self.joined:
            if projection not in joined.parts:
                continue
            name = f"{beside}{joined.name}.{kind}"
            if missing := [part for part in joined.parts if f"{beside}{part}.{kind}" not in shapes]:
                raise ValueError(
                    f"{name} is to hold {', '.join(joined.parts)}; the model has no {missing[0]}"
                )
            if joined.by is not None and joined.by not in canonical.axes:
                raise ValueError(
                    f"{name} is divided by {joined.by!r}, and its module names the axes "
                    f"{', '.join(canonical.axes) or 'none'}"
                )
            groups = 1 if joined.by is None else canonical.axes[joined.by]
            rows = [shapes[f"{beside}{part}.{kind}"][0] for part in joined.parts]
            if any(count % groups for count in rows):
                raise ValueError(
                    f"{name}: {joined.parts} of {rows} rows cannot be divided into {groups} groups"
                )
            widths = [count // groups for count in rows]
            piece = joined.parts.index(projection)
            return piece_of_groups(self.name(name), widths, piece, groups, canonical.shape[1:])
        return None


def canonical_forms(model: nn.Module) -> dict[str, Expr]:
    """Every saved tensor of a model as an expression over canonical names, in the model's order.

    A module's `canonical_form(path, name)`, where it has one, says what its tensor `name` is made of; None
    there means that it stands for itself, as everywhere else. A module's `axes`, where it has any, names
    sizes by which layouts divide its tensors and those of the modules within it, such as {"head_dim": 64}.
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
    """What a checkpoint holds: the parameters and the persistent buffers, by native name; a tied one once."""
    return {f"{path}.{name}" if path else name: tensor for path, _, name, tensor in _saved(model)}


def plain_path(path: str) -> str:
    """A path in the module tree without what torch's checkpoint wrapper and torch.compile put into it."""
    return ".".join(step for step in path.split(".") if step not in WRAPPERS)


WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def _saved(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        own |= {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield plain_path(path), module, name, tensor


def _axes(form: Expr) -> Mapping[str, int]:
    return next(form.refs()).axes


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
