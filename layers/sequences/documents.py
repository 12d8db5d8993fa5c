"""The documents of a batch: which tokens belong together, and how they lie in the caller's [batch, seq]."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels import document_bounds
from liger_models.kernels._copies import to_device
from liger_models.kernels.recurrent._chunk_table import ChunkTables
from liger_models.layers.sequences.part import Part
from liger_models.layers.sequences.tree import Tree

IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class Documents(Part):
    """T tokens, one document after the other, without padding.

    Attributes:
        shape: (batch, seq) of the caller's tensors.
        device: the device of the tensors.
        max_seqlen: the length of the longest document, including what it continues.
        cu_seqlens: [n + 1] int32, the boundaries of the documents; None if every row of `shape` is one.
        kept: [T], the places of the tokens in the flattened batch; None if no padding was removed.
        host_cu_seqlens: `cu_seqlens` on the host, where they are known.
        tree: which documents continue others (tree.py).
        gapped_extent: the distance from the first to the last token of the longest row that has padding
            between its tokens; 0 if there is no such row.
    """

    shape: tuple[int, int]
    device: torch.device
    max_seqlen: int
    cu_seqlens: Tensor | None = None
    kept: Tensor | None = None
    host_cu_seqlens: list[int] | None = None
    tree: Tree | None = None
    gapped_extent: int = 0

    @classmethod
    def of_rows(cls, shape: tuple[int, int], device: torch.device) -> Documents:
        """Rows that are one document each."""
        return cls(shape, device, shape[1])

    @classmethod
    def packed(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        cu_seqlens: Tensor,
        parents: Sequence[int] | Tensor | None = None,
    ) -> Documents:
        """Documents between given boundaries.

        Raises:
            DataError: boundaries out of order, or `parents` that `Tree` refuses.
        """
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise DataError(
                f"cu_seqlens must be a row of integers, found {cu_seqlens.dtype} of shape "
                f"{tuple(cu_seqlens.shape)}"
            )
        bounds, total = cu_seqlens.tolist(), shape[0] * shape[1]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or min(lengths) < 0:
            raise DataError(
                f"cu_seqlens must rise from 0 to the number of tokens, {total}; it holds {len(bounds)} values"
                f"{f' from {bounds[0]} to {bounds[-1]}' if bounds else ''}"
            )
        on_device = to_device(cu_seqlens.to(torch.int32), device)
        tree = None if parents is None else Tree.of(bounds, parents, device)
        longest = max(lengths) if tree is None else tree.longest
        return cls(shape, device, longest, cu_seqlens=on_device, host_cu_seqlens=bounds, tree=tree)

    @classmethod
    def of_mask(cls, mask: Tensor, device: torch.device) -> Documents:
        """Rows without their padding, where `mask` [batch, seq] bool is false.

        Raises:
            DataError: no token at all.
        """
        shape, lengths = (mask.shape[0], mask.shape[1]), mask.sum(1)
        counts, extents = torch.stack([lengths, _extents(mask)]).tolist()
        if sum(counts) == mask.numel():
            return cls.of_rows(shape, device)
        if not sum(counts):
            raise DataError("attention_mask is 0 everywhere: the batch holds no token")
        kept = mask.flatten().nonzero()[:, 0]
        cu = torch.zeros(shape[0] + 1, dtype=torch.int32, device=device)
        cu[1:] = lengths.cumsum(0)
        gapped = (extent for extent, count in zip(extents, counts, strict=True) if extent > count)
        longest_gapped = max(gapped, default=0)
        return cls(shape, device, max(counts), cu_seqlens=cu, kept=kept, gapped_extent=longest_gapped)

    @property
    def num_tokens(self) -> int:
        return self.shape[0] * self.shape[1] if self.kept is None else self.kept.shape[0]

    @property
    def is_single(self) -> bool:
        """Whether one document holds all tokens."""
        return self.cu_seqlens is None and self.shape[0] == 1

    def boundaries(self) -> Tensor:
        """[n + 1] int32 boundaries of the documents on the device, also of rows that are one document each.
        Made once for all layers, without waiting for the device.
        """
        return self._once("boundaries", self._of_rows) if self.cu_seqlens is None else self.cu_seqlens

    def host_boundaries(self) -> list[int]:
        """`boundaries` on the host. Waits for the device, once for all layers, if they are known only
        there.
        """
        if self.host_cu_seqlens is not None:
            return self.host_cu_seqlens
        batch, seq = self.shape
        if self.cu_seqlens is None:
            return list(range(0, (batch + 1) * seq, seq))
        return self._once("host boundaries", self.cu_seqlens.tolist)

    def _of_rows(self) -> Tensor:
        batch, seq = self.shape
        return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=self.device)

    def places_within(self) -> tuple[Tensor, int]:
        """The place of each token in its document, [T], and the length of the longest."""
        (batch, seq), cu, total = self.shape, self.cu_seqlens, self.num_tokens
        if cu is None:
            return torch.arange(seq, device=self.device).repeat(batch), seq
        starts = torch.repeat_interleave(cu[:-1], cu.diff(), output_size=total)
        return torch.arange(total, device=self.device) - starts, self.max_seqlen

    def bounds(self) -> Tensor | None:
        """Start and end of each token's document, [2, T] int32, computed once for all layers; None if one
        document holds all tokens.
        """
        if self.is_single:
            return None
        return self._once("bounds", lambda: document_bounds(self.boundaries(), self.num_tokens))

    def chunk_tables(self) -> ChunkTables | None:
        """The tables of chunks for recurrent layers' kernels, which torch.compile does not run."""
        if torch.compiler.is_compiling():
            return None
        return self._once("chunk tables", lambda: ChunkTables(self.max_seqlen))

    def chunks(self, size: int) -> Documents:
        """The same tokens as shorter documents: each document cut into pieces of `size` tokens, the last of
        which may be shorter. Made once for all layers, without waiting for the device.
        """
        if size >= self.max_seqlen:
            return self
        if self.tree is not None:
            raise ValueError("documents that continue others cannot be cut")
        return self._once(("chunks", size), lambda: self._chunks(size))

    def _chunks(self, size: int) -> Documents:
        total = self.num_tokens
        if self.cu_seqlens is None and self.shape[1] % size == 0:
            return Documents((total // size, size), self.device, size)
        cut = _with_cuts(self.boundaries(), size, total)
        # torch.compile of torch 2.11 takes fields that have a default by their names only.
        return Documents(self.shape, self.device, size, cu_seqlens=cut, kept=self.kept)

    def pack(self, tensor: Tensor) -> Tensor:
        """[batch, seq, ...] -> the T tokens, [T, ...]."""
        flat = tensor.flatten(0, 1)
        return flat if self.kept is None else flat[self.kept.to(flat.device)]

    def unpack(self, tensor: Tensor) -> Tensor:
        """[T, ...] -> [batch, seq, ...], zero at padding."""
        if self.kept is not None:
            full = tensor.new_zeros((self.shape[0] * self.shape[1], *tensor.shape[1:]))
            tensor = full.index_put((self.kept.to(tensor.device),), tensor)
        return tensor.unflatten(0, self.shape)

    def next_labels(self, labels: Tensor) -> Tensor:
        """The label of the next token of the document, [T]; a document's last token has none."""
        if self.cu_seqlens is None:
            rows = labels.view(self.shape)
            ends = rows.new_full((self.shape[0], 1), IGNORE_INDEX)
            return torch.cat([rows[:, 1:], ends], dim=1).flatten()
        shifted = labels.roll(-1)
        if self.kept is not None:  # across a gap in a mask the next token is not the one to predict
            shifted[:-1][self.kept.diff() != 1] = IGNORE_INDEX
        # An empty document's end is its neighbour's end (or index -1, the very last): always the end of some
        # document.
        shifted[self.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
        return shifted


def _extents(mask: Tensor) -> Tensor:
    """The distance from the first to the last token of each row of a mask [batch, seq], [batch]."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last, before_end = (places * mask).amax(1), (places * mask.flip(1)).amax(1)
    return (last + before_end - mask.shape[1]).clamp(min=0)


def _with_cuts(cu_seqlens: Tensor, size: int, total: int) -> Tensor:
    """Boundaries of documents, and of pieces of `size` tokens within them. How many there are is known on the
    device only: empty documents at the end make up for that.
    """
    counts = (cu_seqlens.diff() + size - 1) // size
    ends = counts.cumsum(0)
    piece = torch.arange(total // size + len(counts), device=cu_seqlens.device)  # no more than these
    document = torch.searchsorted(ends, piece, right=True).clamp(max=len(counts) - 1)
    starts = cu_seqlens[document] + size * (piece - (ends - counts)[document])
    starts = torch.where(piece < ends[-1], starts, total)
    return torch.cat([starts, starts.new_full((1,), total)]).to(torch.int32)
