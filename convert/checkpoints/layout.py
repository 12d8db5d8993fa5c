"""Names from the module tree: what each native tensor is made of, and how a checkpoint may differ from that.

The module tree is called as LLaMA's checkpoint is, so a tensor's path in it is its canonical name. A module
that packs several tensors into one says so itself (`canonical_form`): a packed projection names its parts,
stacked experts theirs. A family says only in what its checkpoints differ, as `Layout`s:

    Layout(rename=((".router.", ".gate."),), whole=("*.experts.*",))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import Cat, Expr, Permute, Ref, Rows, Stack, permuted


@dataclass(frozen=True)
class Layout:
    """How a checkpoint differs from the canonical form.

    Attributes:
        rename: (old, new) pieces of the names in the checkpoint, replaced in this order.
        whole: patterns (with `*`) of native names whose tensors the checkpoint holds packed, as we do.
        permuted: (pattern, order) of canonical names whose tensors lie in another order, such as
            ("*.experts.gate_up_proj", "e h (i 2) -> e (2 i) h"): see `weight_map.permuted`.
        root: stands in front of every canonical name but those of the head.
        parts: what canonical names begin with whose rest has names of its own, such as ("vision.",
            Layout(root="visual.")): of these layouts `rename` and `root` count.
    """

    rename: tuple[tuple[str, str], ...] = ()
    whole: tuple[str, ...] = ()
    permuted: tuple[tuple[str, str], ...] = ()
    root: str = "model."
    parts: tuple[tuple[str, Layout], ...] = ()

    def weight_map(self, forms: Mapping[str, Expr]) -> dict[str, Expr]:
        """Expressions over this layout's tensors from canonical ones (`canonical_forms`)."""
        return {
            native: self._source(Ref(native, form.shape) if _matches(native, self.whole) else form)
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

    def _source(self, form: Expr) -> Expr:
        match form:
            case Ref(canonical, shape):
                for pattern, order in self.permuted:
                    if fnmatchcase(canonical, pattern):
                        return permuted(self.name(canonical), shape, order)
                return Ref(self.name(canonical), shape)
            case Cat(parts, dim):
                return Cat(tuple(map(self._source, parts)), dim)
            case Stack(parts):
                return Stack(tuple(map(self._source, parts)))
            case Permute(part, view, order, shape):
                return Permute(self._source(part), view, order, shape)
            case Rows(part, start, stop, dim):
                return Rows(self._source(part), start, stop, dim)
        raise TypeError(f"a canonical form cannot hold a {type(form).__name__}")


def canonical_forms(model: nn.Module) -> dict[str, Expr]:
    """Every saved tensor of a model as an expression over canonical names, in the model's order.

    A module's `canonical_form(path, name)`, where it has one, says what its tensor `name` is made of; None
    there means that it stands for itself, as everywhere else.
    """
    forms: dict[str, Expr] = {}
    for path, module, name, tensor in _saved(model):
        native = f"{path}.{name}" if path else name
        ask = getattr(module, "canonical_form", None)
        form = None if ask is None else ask(path, name)
        forms[native] = Ref(native, shape_of(tensor)) if form is None else form
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


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
