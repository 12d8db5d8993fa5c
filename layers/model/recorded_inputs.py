"""The tensors that recorded layers read: a call's own, and the ones at the addresses of a recording.

Documents in a recording are described by a fixed number of boundaries, more than a call has: the rest are
empty documents at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_models.kernels._dispatch import next_power_of_2
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility

TOKENS_PER_DOCUMENT = 64  # mean length that a recording allows for; shorter ones double its size


@dataclass
class RecordedInputs:
    """The tensors that the layers read, in a call or at the addresses of a recording.

    Attributes:
        x: [T, H].
        further: inputs of layers, by name.
        sequences: the batch.
        max_documents: that a recording can hold; None if rows are one document each.
        longest: upper bound of documents' lengths in a recording.
    """

    x: Tensor
    further: dict[str, Tensor]
    sequences: Sequences
    max_documents: int | None
    longest: int

    @classmethod
    def of(
        cls, x: Tensor, sequences: Sequences, further: dict[str, Tensor], lengths_decide: bool
    ) -> RecordedInputs:
        """The inputs of a call. `lengths_decide`: whether layers run other kernels for longer documents."""
        documents = sequences.documents
        if documents.cu_seqlens is None:
            return cls(x, further, sequences, None, documents.max_seqlen)
        max_documents = _max_documents(len(documents.cu_seqlens) - 1, documents)
        longest = _longest(documents) if lengths_decide else documents.num_tokens
        return cls(x, further, sequences, max_documents, longest)

    @property
    def differentiable(self) -> list[Tensor]:
        return [self.x, *self.further.values()]

    @property
    def constant(self) -> list[Tensor]:
        """Tensors without gradients, the boundaries of documents excepted."""
        positions, visibility = self.sequences.positions, self.sequences.visibility
        tables = itertools.chain.from_iterable(positions.rotary.values())
        optional = positions.axes, visibility.spans, visibility.marked, visibility.padding
        return [positions.ids, *(x for x in optional if x is not None), *tables]

    def key(self) -> Hashable:
        """All that decides which kernels run, as far as it depends on the call."""
        documents, positions = self.sequences.documents, self.sequences.positions
        visibility, device = self.sequences.visibility, self.x.device.type
        tensors = (*self.differentiable, *self.constant)
        return (
            tuple((x.shape, x.dtype, x.requires_grad) for x in tensors),
            (tuple(self.further), tuple(positions.rotary), self.x.device),
            (self.max_documents, self.longest, documents.shape if self.max_documents is None else None),
            tuple(
                x is None for x in (positions.axes, visibility.spans, visibility.marked, visibility.padding)
            ),
            visibility.with_images,
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )

    def batch(self) -> Sequences:
        """The sequences, without the notes and the cached values of earlier layers."""
        visibility, positions = self.sequences.visibility, self.sequences.positions
        visibility = replace(visibility, documents=replace(visibility.documents))
        return Sequences(visibility, replace(positions))

    def lasting(self) -> RecordedInputs:
        """Tensors of the same shapes for a recording, with the contents of this call."""
        positions, visibility = self.sequences.positions, self.sequences.visibility
        documents = visibility.documents
        if self.max_documents is None:
            documents = Documents(documents.shape, documents.device, documents.max_seqlen)
        else:
            assert documents.cu_seqlens is not None
            cu_seqlens = documents.cu_seqlens.new_zeros(self.max_documents + 1)
            shape = (1, documents.num_tokens)
            documents = Documents(shape, documents.device, self.longest, cu_seqlens=cu_seqlens)
        visibility = Visibility(
            documents,
            spans=_empty_or_none(visibility.spans),
            marked=_empty_or_none(visibility.marked),
            padding=_empty_or_none(visibility.padding),
            with_images=visibility.with_images,
        )
        rotary = {rope: (_empty(cos), _empty(sin)) for rope, (cos, sin) in positions.rotary.items()}
        ids = _empty(positions.ids)
        positions = replace(positions, ids=ids, axes=_empty_or_none(positions.axes), rotary=rotary)
        own = Sequences(visibility, positions)
        further = {name: _leaf(x) for name, x in self.further.items()}
        lasting = RecordedInputs(_leaf(self.x), further, own, self.max_documents, self.longest)
        lasting.fill(self)
        return lasting

    @torch.no_grad()
    def fill(self, call: RecordedInputs) -> None:
        """Copy a call's tensors here."""
        for own, given in zip(self.differentiable, call.differentiable, strict=True):
            own.copy_(given)
        for own, given in zip(self.constant, call.constant, strict=True):
            own.copy_(given)
        own_bounds, bounds = self.sequences.documents.cu_seqlens, call.sequences.documents.cu_seqlens
        if own_bounds is not None and bounds is not None:
            own_bounds[: len(bounds)].copy_(bounds)
            own_bounds[len(bounds) :].fill_(call.sequences.documents.num_tokens)  # empty documents


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _empty(x)


def _leaf(x: Tensor) -> Tensor:
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)


def _max_documents(count: int, documents: Documents) -> int:
    """The number of documents in a recording for a call with `count` of them: few numbers, so that few
    recordings serve all calls.
    """
    max_documents = documents.shape[0] + -(-documents.num_tokens // TOKENS_PER_DOCUMENT)
    while max_documents < count:
        max_documents *= 2
    return max_documents


def _longest(documents: Documents) -> int:
    """The next power of two, so that layers which choose a number of keys, itself a power of two, decide as
    they do for the longest document.
    """
    return min(next_power_of_2(max(documents.max_seqlen, 1)), documents.num_tokens)
