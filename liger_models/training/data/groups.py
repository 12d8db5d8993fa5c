"""Groups of two sequences, which preferences and judgements are made of: two answers with their prompt, or
one with a stranger beside it (KTO).

A corpus holds a group as one document, the tokens of its sequences one after another, and so it stays in one
row and comes once an epoch. All its tokens are inputs, also a sequence's last, whose hidden state a reward is
read from. In a batch the groups' first sequences come first, then the second ones in the same order: losses
take them apart with `.chunk(2)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.training.data.corpus import Corpus
from liger_models.training.data.documents import IGNORE, Counts, Documents
from liger_models.training.data.packing import Piece, Row


class GroupBatch(NamedTuple):
    """A micro-batch of n groups: sequences laid end to end as one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the token after each input; -100 where it is not trained
    cu_seqlens: Tensor  # [2 n + 1] int32, on the CPU: to read it there costs no synchronisation
    good: Tensor  # [n] bool: whether the first sequence ends in a good answer
    reference: Tensor  # [2 n] float32: log-probabilities under the reference; nan where there is none

    def pinned(self) -> GroupBatch:
        """In memory from which a GPU copies while the host goes on."""
        return GroupBatch(*(tensor.pin_memory() for tensor in self))

    def to(self, device: torch.device) -> GroupBatch:
        if device.type != "cuda":
            return self
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in self)
        return GroupBatch(*moved)._replace(cu_seqlens=self.cu_seqlens)

    def half(self, number: int) -> GroupBatch:
        """The first sequences alone (0), or the second ones (1)."""
        n = len(self.good)
        bounds = self.cu_seqlens[number * n : (number + 1) * n + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        return GroupBatch(
            self.input_ids[:, tokens],
            self.shift_labels[:, tokens],
            bounds - bounds[0],
            self.good,
            self.reference.chunk(2)[number],
        )


class Groups(Documents):
    """Documents that are groups. Rows of theirs hold whole groups."""

    def longest_piece(self, seq_len: int) -> int:
        """The most tokens of one sequence."""
        longest = 0
        for corpus in {id(part.corpus): part.corpus for part in self.parts}.values():
            first, total = _groups(corpus)[:, 0], corpus.starts.diff()
            longest = max(longest, int(torch.maximum(first, total - first).max()))
        return longest

    def count(self, rows: Iterable[Row]) -> Counts:
        found = [self._sequences(piece) for row in rows for piece in row]
        sides = list(zip(*found, strict=True))
        lengths = torch.tensor([stop - start for side in sides for start, stop in side])
        labels = [sum(int(self._read(*bounds)[1].sum()) for bounds in side) for side in sides]
        return Counts(lengths, sum(labels), len(found), labels[0])

    def batch(self, rows: Sequence[Row]) -> GroupBatch:
        """Rows as one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        places = [self._place(piece) for piece in pieces]
        sides = zip(*(self._sequences(piece) for piece in pieces), strict=True)
        ids, labels, lengths = [], [], [0]
        for start, stop in itertools.chain(*sides):
            tokens, trained = self._read(start, stop)
            ids.append(tokens.long())
            following = torch.where(trained[1:], tokens[1:].long(), IGNORE)
            labels.append(torch.cat([following, torch.tensor([IGNORE])]))
            lengths.append(stop - start)
        reference = torch.stack([_reference(corpus)[document] for corpus, document in places])
        return GroupBatch(
            torch.cat(ids)[None],
            torch.cat(labels)[None],
            torch.tensor(lengths).cumsum(0).int(),
            torch.stack([_groups(corpus)[document, 1] for corpus, document in places]).bool(),
            reference.T.flatten(),
        )

    def documents_of(self, rows: Iterable[Row]) -> list[int]:
        """The numbers of the groups of rows in their corpora, in the order of `batch`."""
        return [self._place(piece)[1] for row in rows for piece in row]

    def _place(self, piece: Piece) -> tuple[Corpus, int]:
        """The corpus and the number of the document in it."""
        corpus, base = self._corpus_at(piece.start)
        return corpus, int(torch.searchsorted(corpus.starts, piece.start - base, right=True)) - 1

    def _sequences(self, piece: Piece) -> list[tuple[int, int]]:
        """First token and end of both."""
        corpus, document = self._place(piece)
        cut = piece.start + int(_groups(corpus)[document, 0])
        return [(piece.start, cut), (cut, piece.stop)]


def _groups(corpus: Corpus) -> Tensor:
    assert corpus.groups is not None
    return corpus.groups


def _reference(corpus: Corpus) -> Tensor:
    if corpus.reference is None:
        corpus.reference = torch.full((len(corpus), 2), torch.nan)
    return corpus.reference
