"""Renaming of quantised tensors inside transformers' own loader and writer."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import WeightRenaming

from liger_models.convert.checkpoints.expressions import Cat, Ref


class CheckpointRenaming(WeightRenaming):
    """Entry of a quantised model for tensors that are only renamed. Their weights may be packed, with further
    tensors under the same name ("o_proj.weight.absmax"), which the quantiser reads and writes.

    Args:
        groups: the model's `Groups` (weights.py).
    """

    __slots__ = ("backwards", "groups", "pattern")

    def __init__(self, pattern: str, groups: Any, backwards: bool = False):
        super().__init__(pattern, pattern)
        self.pattern, self.groups, self.backwards = pattern, groups, backwards

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return (the other name of a renamed tensor, the pattern that identifies this entry)."""
        for prefix in prefixes_of(self, self.groups):
            name = source_key.removeprefix(prefix)
            other = renamed(self.groups, name, self.backwards)
            if source_key.startswith(prefix) and other is not None:
                self._was_used = True
                if not self.backwards and name in self.groups.of_checkpoint:
                    self.groups.note(name)
                return prefix + other, self.pattern
        return source_key, None

    def reverse_transform(self) -> CheckpointRenaming:
        return self._with_direction(not self.backwards)

    def __deepcopy__(self, memo: object) -> CheckpointRenaming:
        return self._with_direction(self.backwards)

    def _with_direction(self, backwards: bool) -> CheckpointRenaming:
        other = CheckpointRenaming(self.pattern, self.groups, backwards)
        other.scope_prefix, other.base_model_prefix = self.scope_prefix, self.base_model_prefix
        return other


def renamed(groups: Any, name: str, backwards: bool) -> str | None:
    """The other name of a tensor that is only renamed, or of one under its name; None for others."""
    module, weight, rest = name.partition(".weight")
    known = groups.of_native if backwards else groups.of_checkpoint
    if module + weight not in known:
        return None
    (native, expr), *more = known[module + weight][0].natives.items()
    if isinstance(expr, Cat) and len(expr.parts) == 1:
        (expr,) = expr.parts
    if more or not isinstance(expr, Ref):
        return None
    return (expr.name if backwards else native) + rest


def prefixes_of(entry: Any, groups: Any) -> tuple[str, ...]:
    """Possible prefixes of a model's names; for a submodel, its path in the whole model."""
    if entry.scope_prefix is None:
        return "", groups.prefix
    base, scope = (f"{part}." if part else "" for part in (entry.base_model_prefix, entry.scope_prefix))
    return base + scope, scope
