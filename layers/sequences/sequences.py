"""A batch inside the model: one row of tokens, in documents.

Inside a model hidden states are `[T, H]`: the tokens of all documents, one after another, without padding. A
`[batch, seq]` call is the case of equal documents. Padding is removed here; it comes back only in logits that
a caller asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels.attention.flash_attention import Once
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.modality import Modality
from liger_models.layers.sequences.notes import Notes
from liger_models.layers.sequences.positions import Positions
from liger_models.layers.sequences.reading import read_call
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import RopeSpec


class Grids(NamedTuple):
    """The grids of the pictures whose patches are the tokens, in an image encoder.

    Attributes:
        sizes: rows and columns of each picture, or of each time step of a video.
        merge: patches come in blocks of so many times so many (layers/vision/patch_order.py).
    """

    sizes: tuple[tuple[int, int], ...]
    merge: int


class Sequences:
    """The tokens of one call of a model, in frozen parts.

    Attributes:
        visibility: the documents, and the tokens that each token attends to.
        positions: the position of each token, and rotary tables.
        notes: values that layers leave for the code after them.
        cache: the key-value cache, in generation only.
        slice: the tokens of this rank, if sequences are divided over ranks. The positions belong to these
            tokens, and the documents to the whole batch, since documents span ranks.
        once: runs a function, or returns its results from the first run of a layer that runs again.
        grids: of pictures, in an image encoder.
        modality: the tokens of text and of pictures, if layers compute them with different weights.
        unseen: mask of frames that no other frame sees, [T], in an encoder of sounds.

    Frameworks that move or cast the arguments of a module (FSDP2's mixed precision, DistributedDataParallel,
    accelerate) copy the dataclasses, lists and dicts that they find and round the tensors in them, or call a
    method `to`. So this class is none of these and has no such method, and rotary tables stay float32.
    """

    def __init__(
        self,
        visibility: Visibility,
        positions: Positions,
        cache: KVCache | None = None,
        notes: Notes | None = None,
        slice: Slice | None = None,
        once: Once | None = None,
        grids: Grids | None = None,
        modality: Modality | None = None,
    ):
        self.visibility, self.positions, self.cache = visibility, positions, cache
        self.notes, self.slice, self.once = Notes() if notes is None else notes, slice, once
        self.grids, self.modality = grids, modality
        self.unseen: Tensor | None = None

    @classmethod
    def from_call(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Sequence[int] | Tensor | None = None,
    ) -> Sequences:
        """Read the documents from the arguments of a call.

        `attention_mask` [batch, seq] is 0 at padding. `cu_seqlens` [n + 1] bounds packed documents over the
        flattened tokens (on the CPU it costs no synchronisation), and `parents` [n] or [2, n] says which of
        them each continues, -1 for none (layers/sequences/tree.py). Position ids that start anew without
        `attention_mask` or `cu_seqlens` mark packed documents too, as in transformers. `position_ids` [3,
        batch, seq] have three axes, and [4, batch, seq] has positions that count tokens in front of these.

        Raises:
            DataError: shapes that do not fit, two descriptions of the documents at once, boundaries out of
                order, `parents` that `Tree` refuses.
        """
        documents, positions = read_call(shape, device, attention_mask, position_ids, cu_seqlens, parents)
        return cls(Visibility(documents), positions)

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> Sequences:
        """One row of documents of these lengths."""
        total = sum(lengths)
        if len(set(lengths)) == 1:
            return cls.from_call((len(lengths), lengths[0]), device)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls.from_call((1, total), device, cu_seqlens=cu_seqlens)

    @property
    def documents(self) -> Documents:
        """The documents of the whole batch."""
        return self.visibility.documents

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def count_tokens_alone(self) -> None:
        """Let positions count the tokens of a row and not its padding, unless the caller chose them."""
        if not self.positions.given and self.documents.kept is not None:
            ids, end = self.documents.places_within()
            self.positions = Positions(self.own(ids), end)

    def prepare_rotary(self, ropes: tuple[RopeSpec, ...], factors: Tensor | None = None) -> None:
        """Make the tables of every rotary setting in the model, with these factors of learned frequencies.

        Raises:
            DataError: a position that the tables were not made for, or on axes that the model does not have.
        """
        self.positions = self.positions.with_rotary(ropes, self.documents.shape, factors)

    def on(self, device: torch.device) -> Sequences:
        """The same batch for a layer on another device, where a model is divided over several. Tensors are
        copied once a device; the notes and the cache are shared.
        """
        if device == self.device:
            return self
        parts = self.visibility.to(device), self.positions.to(device)
        modality = None if self.modality is None else self.modality.to(device)
        own = Sequences(*parts, self.cache, self.notes, self.slice, self.once, self.grids, modality)
        own.unseen = None if self.unseen is None else self.unseen.to(device)
        return own

    def running(self, once: Once) -> Sequences:
        """The same batch for a layer whose expensive functions `once` runs."""
        parts = self.visibility, self.positions, self.cache, self.notes, self.slice
        own = Sequences(*parts, once, self.grids, self.modality)
        own.unseen = self.unseen
        return own

    def without_notes(self) -> Sequences:
        """The same documents for another model, whose layers have left no notes yet."""
        return Sequences(Visibility(self.documents), Positions(self.positions.ids, self.positions.end))

    def divided(self, group: Any) -> Sequences:
        """This rank's share of the batch in a process group (sequence_parallel.py); without one, all."""
        if group is None:
            return self
        if self.documents.tree is not None:
            raise DataError("documents that continue others cannot be divided over ranks: leave out parents")
        own = Slice(group, self.documents.num_tokens)
        return Sequences(self.visibility, self.positions.own(own), self.cache, self.notes, own)

    def own(self, tokens: Tensor) -> Tensor:
        """The tokens on this rank, from all tokens [T, ...] of a batch."""
        return tokens if self.slice is None else self.slice.of(tokens)

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a number over the ranks that divide a batch."""
        return value if self.slice is None else self.slice.summed(value)

    def pack(self, tensor: Tensor) -> Tensor:
        """[batch, seq, ...] -> the tokens on this rank, [T, ...]."""
        return self.own(self.documents.pack(tensor))

    def unpack(self, tensor: Tensor) -> Tensor:
        """The tokens on this rank, [T, ...] -> [batch, seq, ...] of the whole batch, zero at padding."""
        return self.documents.unpack(tensor if self.slice is None else self.slice.gathered(tensor))
