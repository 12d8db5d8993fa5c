"""Attention in which a document's results do not depend on the other documents of the batch.

A GPU's kernel divides the row into tiles of queries and keys, so the order of a document's sums depends on
its place. Here every document begins a tile: it is moved to the next multiple of `ALIGNED` tokens, and the
gap is filled with copies of its last token, which form a document of their own. Elsewhere each document is
one call, on operands of its own.

Bytes moved in addition, per token: twice its query, key, value and result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.visibility import Visibility

ALIGNED = 128  # tokens: a multiple of all tiles of kernels/attention

Attend = Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]


def attend_aligned(q: Tensor, k: Tensor, v: Tensor, documents: Documents, attend: Attend) -> Tensor:
    """attend(q, k, v, visibility) on documents that begin at multiples of `ALIGNED` tokens."""
    rows = _aligned_rows(documents)
    q, k, v = (_Move.apply(x, rows.token_of_row, rows.row_of_token) for x in (q, k, v))
    out = attend(q, k, v, Visibility(rows.documents))
    return _Move.apply(out, rows.row_of_token, rows.token_of_row)


def attend_alone(q: Tensor, k: Tensor, v: Tensor, documents: Documents, attend: Attend) -> Tensor:
    """attend(q, k, v, visibility) on one document at a time."""
    lengths = documents.boundaries().diff().tolist()
    parts = []
    for of_q, of_k, of_v in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        if len(of_q):
            own = [x.clone(memory_format=torch.contiguous_format) for x in (of_q, of_k, of_v)]
            parts.append(attend(own[0], own[1], own[2], one_document(len(of_q), q.device)))
    return torch.cat(parts)


def check_alone(visibility: Visibility) -> None:
    """Refuse documents whose tokens attend to more than the earlier tokens of their own document.

    Raises:
        ValueError: shared prompts, spans of images, or padding kept in rows.
    """
    of = visibility.documents.tree is not None and "documents that continue others (shared prompts)"
    of = of or (visibility.spans is not None and "spans of tokens that attend to one another")
    of = of or (visibility.padding is not None and "padding kept within rows")
    of = of or (visibility.hidden is not None and "images whose last patches are hidden")
    if of:
        raise ValueError(f"batch_invariant() does not support {of}; pass separate sequences")


@dataclass(frozen=True)
class _AlignedRows:
    """Attributes:
    documents: the aligned documents, each followed by one that fills its gap.
    token_of_row: [rows], the token in each row, repeated in gaps.
    row_of_token: [T].
    """

    documents: Documents
    token_of_row: Tensor
    row_of_token: Tensor


def _aligned_rows(documents: Documents) -> _AlignedRows:
    return documents._once("aligned rows", lambda: _align(documents))


def _align(documents: Documents) -> _AlignedRows:
    bounds, total = documents.boundaries().long(), documents.num_tokens
    lengths, count = bounds.diff(), len(bounds) - 1
    # The number of rows is known on the device alone: this many suffice, and are fewer than twice as many.
    most = min(total // ALIGNED + count, total) * ALIGNED
    ends = ((lengths + ALIGNED - 1) // ALIGNED * ALIGNED).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    token = torch.arange(total, device=bounds.device)
    document = torch.searchsorted(bounds[1:], token, right=True)
    row_of_token = token + (starts - bounds[:-1])[document]
    row = torch.arange(most, device=bounds.device)
    document = torch.searchsorted(ends, row, right=True).clamp(max=max(count - 1, 0))
    place = torch.minimum(row - starts[document], lengths[document] - 1)
    token_of_row = (bounds[document] + place).clamp(0, total - 1)
    # start, end of the document, start of the next, ...: every second document is a gap.
    cu_seqlens = torch.stack([starts, starts + lengths], dim=1).flatten()
    rest = torch.arange(most // ALIGNED + 1, device=bounds.device) * ALIGNED  # rows after the last document
    rest = torch.maximum(rest, ends[-1:])
    cu_seqlens = torch.cat([cu_seqlens, rest]).int()
    aligned = Documents((1, most), documents.device, documents.max_seqlen, cu_seqlens)
    return _AlignedRows(aligned, token_of_row, row_of_token)


class _Move(torch.autograd.Function):
    """Select the rows `index` of x; `back` has the row of the result for each row of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(0, ctx.back), None, None


def one_document(length: int, device: torch.device) -> Visibility:
    """Visibility within a row that is one document."""
    return Visibility(Documents.of_rows((1, length), device))
