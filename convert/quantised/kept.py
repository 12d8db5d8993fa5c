"""Native tensors that stay in the bytes of their quantised weights.

    kept = keep("layers.0.mlp.experts.gate_up_proj", expr, reader)
    kept.parts["codes"]     # an expression over the bytes of the codes, uint8 [experts, rows, bytes of a row]

The expression of a dense tensor moves whole matrices and rows, so the same one over bytes gives the codes.
Scales that belong to whole matrices only are stacked as these are, in any order of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Cat, Expr, Permute, Ref, Stack
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.quantised.bitsandbytes import OFFSET, FlatBlocks
from liger_models.convert.quantised.formats import CODES, SCALE, Blocks, Format, QuantisedWeight


@dataclass(frozen=True)
class Kept:
    """A native tensor [..., rows, columns] in the bytes of equal quantised matrices.

    Attributes:
        format: of each matrix.
        shape: of the native tensor.
        sections: matrices that lie one below another in the last two dimensions.
        dtypes: of each part of a weight.
        parts: each part as an expression over bytes, whose first dimension is the native tensor's.
        names: of the tensors that hold a part, in the order of the matrices; one if they are stacked.
    """

    format: Format
    shape: tuple[int, ...]
    sections: int
    dtypes: Mapping[str, torch.dtype]
    parts: Mapping[str, Expr]
    names: Mapping[str, tuple[str, ...]]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        *_, rows, columns = self.shape
        return rows // self.sections, columns

    def check(self, parts: Mapping[str, Tensor], first: int = 0) -> None:
        """Check the scales among bytes, which may be those of some rows of the first dimension, from `first`,
        or of the second.

        Raises:
            BadScaleError: a scale is not finite, or not positive.
        """
        before = first if len(self.shape) > 2 else 0
        present = {role: part for role, part in parts.items() if role != CODES and part.numel()}
        cut = {role for role, part in present.items() if part.shape[1:] != self.parts[role].shape[1:]}

        def name_of(role: str, number: int) -> str:
            names = self.names[role]
            if role not in cut:
                return names[(before * self.sections + number) % len(names)]
            start = (before + number) * self.sections % len(names)
            return " or ".join(names[start : start + self.sections])  # of some rows, which may be of either

        typed = self.typed({role: part for role, part in present.items() if role not in cut})
        typed |= {role: present[role].flatten(1).view(self.dtypes[role]) for role in cut}
        self.format.check_stack(self.matrix, typed, name_of)

    def typed(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts by matrix, in their own dtypes."""
        found = {}
        for role, stored in parts.items():
            count = math.prod(stored.shape[:-2]) * self.sections
            rows = (self.matrix[0],) if role == CODES else ()
            found[role] = stored.reshape(count, *rows, -1).view(self.dtypes[role])
        return found


def keep(expr: Expr, weights: Mapping[str, QuantisedWeight]) -> Kept | None:
    """Describe a native tensor in the bytes of its weights, which are in the order of the files; None if they
    do not give it: they differ in their format, or are cut or transposed.

    Args:
        weights: by the names in `expr`.
    """
    refs, sections = list(expr.refs()), len(expr.parts) if isinstance(expr, Cat) else 1
    first = weights[refs[0].name]
    known = [_form(weight) for weight in map(weights.get, _names(refs)) if weight is not None]
    alike = len(known) == len(refs) and all(form == known[0] for form in known)
    if not alike or any(ref.shape != first.shape for ref in refs):
        return None
    rows, columns = first.shape[-2:]
    by_row = isinstance(expr, Permute)
    even = not isinstance(first.format, FlatBlocks) or columns % 2 == 0  # rows of whole bytes
    if not even or not _is_whole(expr) or (by_row and not _has_rows(first)):
        return None
    dtypes = _dtypes(first)
    parts = {}
    for role, dtype in dtypes.items():
        high = rows if by_row else first.format.rows_of(role, (rows, columns), dtype)
        wide = _nbytes(first, role) // (math.prod(first.shape[:-2]) * high)
        shape = (*first.shape[:-2], high, wide)
        parts[role] = _over_bytes(expr, role, shape)
    names = {role: tuple(_name(weights[ref.name], role) for ref in _by_matrix(expr)) for role in dtypes}
    return Kept(_kind(first), expr.shape, sections, dtypes, parts, names)


def stored_parts(
    kept: Kept, weights: Mapping[str, QuantisedWeight]
) -> tuple[dict[str, TensorInfo], dict[str, Tensor]]:
    """Tensors of bytes by the names in `kept.parts`: those in the files, and values that are in none."""
    infos, values = {}, {}
    for role, expr in kept.parts.items():
        for ref in expr.refs():
            weight = weights[ref.name.removesuffix(f"#{role}")]
            info = weight.parts.get(role) or weight.parts[CODES]
            nbytes = math.prod(ref.shape)
            infos[ref.name] = replace(info, name=ref.name, dtype=torch.uint8, shape=ref.shape, nbytes=nbytes)
            if role == OFFSET:
                format: Any = weight.format
                values[ref.name] = torch.tensor([format.offset], device="cpu").view(torch.uint8)
    return infos, values


def _names(refs: list[Ref]) -> list[str]:
    return [ref.name for ref in refs]


def _form(weight: QuantisedWeight) -> tuple[Format, dict[str, torch.dtype], tuple[int, ...]]:
    return _kind(weight), _dtypes(weight), weight.shape


def _kind(weight: Any) -> Format:
    """The format without fields that may differ within a stack."""
    format = weight.format
    return replace(format, offset=0.0) if isinstance(format, FlatBlocks) else format


def _dtypes(weight: Any) -> dict[str, torch.dtype]:
    found = {role: torch.uint8 if role == CODES else info.dtype for role, info in weight.parts.items()}
    nested = isinstance(weight.format, FlatBlocks) and weight.format.nested
    return {**found, OFFSET: torch.float32} if nested else found


def _nbytes(weight: QuantisedWeight, role: str) -> int:
    return 4 if role == OFFSET else weight.parts[role].nbytes


def _name(weight: QuantisedWeight, role: str) -> str:
    return (weight.parts.get(role) or weight.parts[CODES]).name


def _is_whole(expr: Expr) -> bool:
    """Whether an expression stacks whole matrices, with one or several below one another, or reorders rows of
    a stack.
    """
    match expr:
        case Ref(_, shape):
            return len(shape) in (2, 3)
        case Stack(parts):
            return all(isinstance(part, Ref) and len(part.shape) == 2 for part in parts)
        case Cat(parts, 1):
            return len(expr.shape) == 3 and all(
                _is_whole(p) and not isinstance(p, Cat | Permute) for p in parts
            )
        case Permute(Ref(), view, order, shape):
            *_, last = order
            return len(shape) == 3 and last == len(view) - 1 and view[-1] == shape[-1]
    return False


def _has_rows(weight: QuantisedWeight) -> bool:
    """Whether every part of a weight has rows of its own."""
    format = weight.format
    return isinstance(format, Blocks) and format.block[0] == 1 and weight.parts.keys() == {CODES, SCALE}


def _over_bytes(expr: Expr, role: str, shape: tuple[int, ...]) -> Expr:
    if isinstance(expr, Permute):
        part, wide = _over_bytes(expr.part, role, shape), shape[-1]
        return Permute(part, (*expr.view[:-1], wide), expr.order, (*expr.shape[:-1], wide))
    return expr.with_refs(lambda ref: Ref(f"{ref.name}#{role}", shape))


def _by_matrix(expr: Expr) -> list[Ref]:
    """The tensors in the order of the matrices: of each of a stack, the sections."""
    if isinstance(expr, Cat):
        by_section = [_by_matrix(part) for part in expr.parts]
        return [ref for matrices in zip(*by_section, strict=True) for ref in matrices]
    return list(expr.refs())
