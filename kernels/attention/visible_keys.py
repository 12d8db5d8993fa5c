"""Visibility of keys to queries, as tensors that `attention` takes: documents or ranges of keys.

`document_bounds` gives the start and end of documents in causal attention. `KeyRanges` defines visibility
completely: the ranges of keys visible to each query, and the ranges of queries that attend to each key.
Bidirectional spans need one range of each (`key_ranges`). If documents continue others (`tree_ranges`), a
query attends to part of the parent document and part of its own. Tokens that attend to one another across
others between them have ranges from the first to the last of them, and marks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._copies import to_device


class KeyRanges(NamedTuple):
    """Disjoint ranges, [2 * ranges, T] int32 each: start and end of the first, then of the next.

    Attributes:
        of_queries: ranges of keys visible to each query. The first one is never empty.
        of_keys: ranges of queries that attend to each key; their number may differ.
        marked: [T] int32, 0 or 1. Within the ranges a key after the query is visible only if both are marked.
            None: all are.

    An empty range goes from T to 0. A token's empty ranges come last.
    """

    of_queries: Tensor
    of_keys: Tensor
    marked: Tensor | None = None


def document_bounds(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Start and end of each token's document: [2, tokens] int32, on cu_seqlens' device.

    cu_seqlens: [documents + 1] integers that rise from 0 to `tokens`; documents may be empty. Values are
    checked on a CPU only, since the check would synchronise a GPU. Raises ValueError, TypeError.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has the shape {tuple(cu_seqlens.shape)}; expected [documents + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens holds {cu_seqlens.dtype}; expected int32 or int64")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens, {tokens}; "
                f"it holds {len(cu_seqlens)} values from {first} to {last}"
            )
    token = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.bucketize(token, cu_seqlens[1:], right=True)
    bounds = torch.stack([cu_seqlens[document], cu_seqlens[document + 1]]).int()
    return bounds.clamp_(0, tokens)  # no kernel reads out of bounds, even if the boundaries are wrong


def key_ranges(
    bounds: Tensor,
    spans: Tensor | None = None,
    window: int | None = None,
    whole_spans: bool = False,
    marked: Tensor | None = None,
) -> KeyRanges:
    """Ranges for attention that is bidirectional within spans or everywhere: one range per query and per key.

    Args:
        bounds: [2, T] int32, start and end of each token's document, as `document_bounds` returns it.
        spans: [2, T] int32, start and end of the span that contains each token. Tokens of a span all
            attend to one another, in addition to the preceding tokens. (t, t + 1) for a token in no span.
            None: each document is one span, and the window limits both sides.
        window: maximum number of visible tokens up to the query, itself included.
        whole_spans: make the whole span visible, even the part before the window.
        marked: [T] int32, 1 for tokens that attend to one another across others: their spans go from the
            first to the last of them, and hold unmarked tokens, too (`marked_spans`).

    Raises:
        ValueError: marks with whole spans.
    """
    if marked is not None and whole_spans:
        raise ValueError("tokens that attend to one another across others have no whole spans")
    token = torch.arange(bounds.shape[1], dtype=torch.int32, device=bounds.device)
    if spans is None:
        spans = bounds if window is None else torch.stack([token - window + 1, token + window])
    first, end = bounds[0], bounds[1]
    if window is not None:
        first, end = torch.maximum(first, token - window + 1), torch.minimum(end, token + window)
        if whole_spans:
            first = torch.minimum(first, torch.maximum(spans[0], bounds[0]))
            end = torch.maximum(end, torch.minimum(spans[1], bounds[1]))
    # Queries of the same span attend to later keys, and queries within the window to earlier ones.
    of_queries = torch.stack([first, torch.minimum(spans[1], bounds[1])])
    return KeyRanges(of_queries, torch.stack([torch.maximum(spans[0], bounds[0]), end]), marked)


def marked_spans(bounds: Tensor, marked: Tensor) -> Tensor:
    """Spans of tokens that attend to one another across others: for marked tokens the range from the first
    to the last marked one of their document, [2, T] int32; (t, t + 1) for any other token t.

    Args:
        bounds: [2, T] int32, as in `key_ranges`.
        marked: [T] int32, 0 or 1.
    """
    total, first_of_document = len(marked), bounds[0].long()
    token = torch.arange(total, dtype=torch.int32, device=marked.device)
    here = marked > 0
    first = torch.full_like(token, total)
    first.scatter_reduce_(0, first_of_document, token.where(here, total), "amin")
    end = torch.zeros_like(token).scatter_reduce_(0, first_of_document, (token + 1).where(here, 0), "amax")
    together = torch.stack([first[first_of_document], end[first_of_document]])
    return together.where(here, torch.stack([token, token + 1]))


def tree_ranges(
    bounds: Sequence[int],
    parents: Sequence[int],
    device: torch.device,
    window: int | None = None,
    chunk: int | None = None,
    spans: Tensor | None = None,
    shared: Sequence[int] | None = None,
) -> KeyRanges:
    """Ranges for causal attention where documents continue others: a query attends to its document's
    parent, and to its own document up to itself or to the end of its span. Does not synchronise the device.

    Args:
        bounds: [documents + 1], the documents' boundaries in the row.
        parents: [documents], the number of the document that each continues, or -1. A parent has no parent
            itself, and its children follow it directly.
        shared: [documents], how many of the parent's first tokens each document attends to, in descending
            order among children of one parent. None: all of them.
        window: maximum number of visible tokens, the query's own included.
        chunk: a query attends to nothing before the last multiple of it.
        spans: as in `key_ranges`, each within a document.

    Window and chunk count positions. In a document that continues another, positions go on after the last
    token that it attends to in the parent.
    """
    total, limited = bounds[-1], window is not None or chunk is not None
    if shared is None:
        shared = [bounds[parent + 1] - bounds[parent] if parent >= 0 else 0 for parent in parents]
    table = _of_each_token(bounds, parents, shared, limited, device)
    (start, end, parent_start, before), answers = table[:4], table[4:].view((len(table) - 4) // 3, 3, total)
    token = torch.arange(total, dtype=torch.int32, device=device)
    position = token - start + before
    # Positions: the first visible one, and the end of those that attend to it.
    first, beyond = torch.zeros_like(token), torch.full_like(token, total)
    if window is not None:
        first, beyond = torch.maximum(first, position - window + 1), torch.minimum(beyond, position + window)
    if chunk is not None:
        begun = position.div(chunk, rounding_mode="floor") * chunk
        first, beyond = torch.maximum(first, begun), torch.minimum(beyond, begun + chunk)

    seen_from, seen_to = (token, token + 1) if spans is None else spans
    seen = torch.stack([start + (first - before).clamp(min=0), seen_to])
    seen_before = _range(parent_start + first, parent_start + before)
    seen_by_own = torch.stack([seen_from, torch.minimum(end, start - before + beyond)])
    seen_by_answers = _seen_by(answers, token - start, beyond, limited)
    return KeyRanges(torch.cat([seen, seen_before]), torch.cat([seen_by_own, seen_by_answers]))


def _seen_by(answers: Tensor, place: Tensor, beyond: Tensor, limited: bool) -> Tensor:
    """Ranges of queries in other documents that attend to each key, [2 * n, T].

    Args:
        answers: [n, 3, T], as `_of_each_token` returns them.
        place: [T], position of the key in its document, which has no parent if it has children.
        beyond: [T], end of the positions that attend to the key.
    """
    first, end, shared = answers.unbind(1)
    end = torch.minimum(end, first + beyond - shared)
    ranges = _range(first, end.where(place < shared, 0))
    if limited:  # the first ones are empty if the window ends before they begin
        first, order = ranges[0].sort(dim=0)
        ranges = torch.stack([first, ranges[1].gather(0, order)])
    elif len(answers):  # adjacent, and the first of them attend to the key
        ranges = torch.stack([ranges[0].amin(0, True), ranges[1].amax(0, True)])
    return ranges.transpose(0, 1).flatten(0, 1)


def _of_each_token(
    bounds: Sequence[int],
    parents: Sequence[int],
    shared: Sequence[int],
    limited: bool,
    device: torch.device,
) -> Tensor:
    """[4 + 3 * n, T] int32: start and end of the token's document; start of its parent and the number of its
    visible tokens; then, for each child, its start, end and number of visible parent tokens. Without limits,
    adjacent children that attend to the same count as one.
    """
    total = bounds[-1]
    answers: list[list[tuple[int, int, int]]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        first, end = bounds[number : number + 2]
        if parent < 0 or first == end:
            continue
        own = answers[parent]
        if not limited and own and own[-1][2] == shared[number]:
            first = own.pop()[0]
        own.append((first, end, shared[number]))
    most = max(map(len, answers))
    rows = []
    for number, parent in enumerate(parents):
        before = (bounds[parent], shared[number]) if parent >= 0 else (0, 0)
        own = answers[number] + [(total, 0, 0)] * (most - len(answers[number]))
        rows.append([*bounds[number : number + 2], *before, *itertools.chain(*own)])
    lengths = torch.tensor([end - start for start, end in itertools.pairwise(bounds)], device="cpu")
    table = to_device(torch.tensor(rows, dtype=torch.int32, device="cpu").T, device)
    return table.repeat_interleave(to_device(lengths, device), dim=1, output_size=total)


def _range(first: Tensor, end: Tensor) -> Tensor:
    """[2, ..., T], with empty ranges in their normal form."""
    there = first < end
    return torch.stack([first.where(there, first.shape[-1]), end.where(there, 0)])


def visible_keys(
    tokens: int, bounds: Tensor | KeyRanges | None, window: int | None, device: torch.device
) -> Tensor:
    """Mask [tokens, tokens] of the keys (columns) visible to each query (row). `bounds` as in `attention`."""
    token = torch.arange(tokens, device=device)
    if isinstance(bounds, KeyRanges):
        ranges = bounds.of_queries.unflatten(0, (-1, 2))[..., None]
        visible = ((token >= ranges[:, 0]) & (token < ranges[:, 1])).any(0)
        if bounds.marked is not None:
            marked = bounds.marked > 0
            visible &= (token <= token[:, None]) | (marked & marked[:, None])
        return visible
    visible = token[:, None] >= token
    if bounds is not None:
        visible = visible & (token >= bounds[0][:, None])
    if window is not None:
        visible = visible & (token > token[:, None] - window)
    return visible
