"""Which tokens, and which tiles of images, each token attends to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels import KeyRanges, key_ranges, marked_spans
from liger_models.kernels._copies import to_device
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.part import Part


@dataclass(frozen=True, eq=False)
class Visibility(Part):
    """The tokens that each token attends to, within the limits of a layer (causality, window, chunk).

    Attributes:
        documents: the documents.
        spans: [2, T] int32, the first token and the end of each token's span. The tokens of a span (such as
            an image) all attend to one another; a token in none is a span by itself.
        marked: [T] int32, 1 for tokens that attend to one another within their document, whatever is between
            them; their spans go from the first to the last of them.
        padding: [T] bool, padding kept at the end of each row, whose tokens do not attend to one another.
        hidden: how many tokens at the end of each document attend to the others, and no token to them.
        tiles: the image tiles that each token attends to (`VisibleTiles`).
        with_images: whether the call has images.
    """

    documents: Documents
    spans: Tensor | None = None
    marked: Tensor | None = None
    padding: Tensor | None = None
    hidden: tuple[int, ...] | None = None
    tiles: Any = None
    with_images: bool = False

    @classmethod
    def of_marks(cls, documents: Documents, marked: Tensor, with_images: bool) -> Visibility:
        """Visibility in which the marked tokens [T] of a document attend to one another."""
        marked = marked.int()
        return cls(documents, marked_spans(_bounds(documents), marked), marked, with_images=with_images)

    def key_ranges(self, window: int | None, causal: bool, whole_spans: bool = False) -> KeyRanges:
        """The ranges of keys where attention is not causal, or where there are spans: see
        `kernels.key_ranges`. Made once for all layers that are alike.
        """
        if self.documents.tree is not None:
            raise ValueError("in documents that continue others attention is causal, and there are no spans")
        alike = "key_ranges", window, causal, whole_spans
        return self._once(alike, lambda: self._key_ranges(window, causal, whole_spans))

    def _key_ranges(self, window: int | None, causal: bool, whole_spans: bool) -> KeyRanges:
        bounds = _bounds(self.documents)
        if not causal:
            return key_ranges(bounds, None, window, whole_spans)
        return key_ranges(bounds, self.spans, window, whole_spans, self.marked)

    def ranges_with_padding(self) -> KeyRanges:
        """The ranges of keys if all tokens of a row attend to one another, but padding does not attend to
        padding. A row of only padding attends to itself. Made once for all layers.
        """
        return self._once("ranges_with_padding", self._ranges_with_padding)

    def _ranges_with_padding(self) -> KeyRanges:
        assert self.padding is not None
        rows, length = self.documents.shape
        padding = self.padding.view(rows, length)
        first = torch.arange(0, rows * length, length, device=padding.device)[:, None]
        real = length - padding.sum(1, keepdim=True)
        end = first + torch.where(padding & (real > 0), real, length)
        ranges = torch.stack([first.expand_as(end), end]).flatten(1).int()
        return KeyRanges(ranges, ranges)  # attention is symmetric

    def ranges_without_hidden(self) -> KeyRanges:
        """The ranges of keys if all tokens of a document attend to all but its `hidden` last ones. Made once
        for all layers.
        """
        return self._once("ranges_without_hidden", self._ranges_without_hidden)

    def _ranges_without_hidden(self) -> KeyRanges:
        assert self.hidden is not None
        bounds, total = self.documents.host_boundaries(), self.documents.num_tokens
        of_queries, of_keys = torch.empty(2, 2, total, dtype=torch.int32, device="cpu")
        for (start, end), hidden in zip(itertools.pairwise(bounds), self.hidden, strict=True):
            for row, last in enumerate((start, end - hidden)):
                of_queries[row, start:end] = last
            of_keys[:, start : end - hidden] = torch.tensor([[start], [end]], device="cpu")
            of_keys[:, end - hidden : end] = torch.tensor([[total], [0]], device="cpu")  # none
        device = self.documents.device
        return KeyRanges(to_device(of_queries, device), to_device(of_keys, device))

    def without_spans(self) -> Visibility:
        """A copy in which no token attends to later ones. Made once for all layers."""
        if self.spans is None:
            return self
        return self._once("without_spans", lambda: replace(self, spans=None, marked=None))

    def chunks(self, size: int) -> Visibility:
        """A copy with each document cut into pieces of `size` tokens (`Documents.chunks`)."""
        if size >= self.documents.max_seqlen:
            return self
        if self.spans is not None:
            raise ValueError("documents with spans that attend to later tokens cannot be cut")
        return self._once(("chunks", size), lambda: Visibility(self.documents.chunks(size)))


def _bounds(documents: Documents) -> Tensor:
    """Start and end of each token's document, [2, T] int32."""
    bounds, total = documents.bounds(), documents.num_tokens
    if bounds is not None:
        return bounds
    return torch.tensor([[0], [total]], dtype=torch.int32, device=documents.device).expand(2, total)
