"""Conversion of the arguments of a call to documents and positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.positions import Positions, split_axes


def read_call(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    parents: Sequence[int] | Tensor | None = None,
) -> tuple[Documents, Positions]:
    """The documents and the positions of a call: see `Sequences.from_call`."""
    if attention_mask is not None and cu_seqlens is not None:
        raise DataError(
            "got both attention_mask and cu_seqlens: the first is for padding, the second for packed rows"
        )
    if parents is not None and cu_seqlens is None:
        raise DataError("parents names documents of cu_seqlens: pass both")
    counted, axes = (None, None) if position_ids is None else split_axes(position_ids, shape)
    documents = _documents(shape, device, attention_mask, counted, cu_seqlens, parents)
    packed = attention_mask is None and documents.host_cu_seqlens is not None
    ids, end = _positions(documents, counted)
    if axes is not None:
        axes = axes if documents.kept is None else axes[:, documents.kept]
        end = int(axes.max()) + 1
    there = counted is not None or axes is None
    # By keyword: torch 2.11 does not trace six positional arguments of a frozen dataclass.
    given = position_ids is not None
    of_packed = packed and counted is not None
    return documents, Positions(ids, end, axes=axes, given=given, counted=there, of_packed=of_packed)


def _documents(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,  # [batch * seq]
    cu_seqlens: Tensor | None,
    parents: Sequence[int] | Tensor | None,
) -> Documents:
    if cu_seqlens is not None:
        return Documents.packed(shape, device, cu_seqlens, parents)
    if attention_mask is not None:
        _check_mask(attention_mask, shape)
        return Documents.of_mask(attention_mask.bool(), device)
    if position_ids is not None:
        batch, seq = shape
        jumps = position_ids[1:] != position_ids[:-1] + 1
        starts = torch.cat([torch.ones(1, dtype=torch.bool, device=device), jumps])
        starts[torch.arange(0, batch * seq, seq, device=device)] = True
        boundaries = starts.nonzero()[:, 0]
        if boundaries.numel() > batch:
            bounds = torch.cat([boundaries, boundaries.new_tensor([batch * seq])])
            return Documents.packed(shape, device, bounds)
    return Documents.of_rows(shape, device)


def _positions(documents: Documents, given: Tensor | None) -> tuple[Tensor, int]:
    """The positions of the tokens, [T], and one more than the largest."""
    (batch, seq), device = documents.shape, documents.device
    if documents.kept is not None:
        ids = torch.arange(seq, device=device).repeat(batch) if given is None else given
        ids = ids[documents.kept]
        return ids, int(ids.max()) + 1
    if given is not None:
        return given, int(given.max()) + 1 if given.numel() else 0
    if documents.tree is not None:
        return documents.tree.position_ids(), documents.max_seqlen
    return documents.places_within()


def _check_mask(attention_mask: Tensor, shape: tuple[int, int]) -> None:
    if tuple(attention_mask.shape) != shape:
        raise DataError(
            f"attention_mask must have the shape of the tokens, {shape}; found "
            f"{tuple(attention_mask.shape)}. Packed documents are given by cu_seqlens, not by a mask."
        )
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        low, high = (value.item() for value in attention_mask.aminmax())
        raise DataError(
            f"attention_mask holds values from {low} to {high}; expected 1 at tokens and 0 at padding. "
            "Additive masks and document numbers are not supported: cu_seqlens takes document boundaries."
        )
