"""Groups of two sequences, which preferences and judgements are made of: two answers with their prompt, or
one with a stranger beside it (KTO).

A corpus holds a group as one document, the tokens of its sequences one after another, and so it stays in one
row and comes once an epoch. All its tokens are inputs, also a sequence's last, whose hidden state a reward is
read from. In a batch the groups' first sequences come first, then the second ones in the same order: losses
take them apart with `.chunk(2)`.

Where an objective can, what both sequences of a group begin with is computed once, if that spares enough: it
is a document of its own, up to its last token but one, and theirs continue it (losses/shared_prompts.py).
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

SPARED = 0.2  # of a batch's tokens: less is not worth attention of a kind of its own


class GroupBatch(NamedTuple):
    """A micro-batch of n groups: D documents laid end to end as one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the token after each input; -100 where it is not trained
    cu_seqlens: Tensor  # [D + 1] int32, on the CPU: to read it there costs no synchronisation
    parents: Tensor  # [D] int32, on the CPU: the document that each continues, or -1
    sequences: Tensor  # [2 n] int64: the documents in which the groups' sequences end
    good: Tensor  # [n] bool: whether the first sequence ends in a good answer
    reference: Tensor  # [2 n] float32: log-probabilities under the reference; nan where there is none

    def pinned(self) -> GroupBatch:
        """In memory from which a GPU copies while the host goes on."""
        return GroupBatch(*(tensor.pin_memory() for tensor in self))

    def to(self, device: torch.device) -> GroupBatch:
        if device.type != "cuda":
            return self
        moved = (tensor.pin_memory().to(device, non_blocking=True) for tensor in self)
        return GroupBatch(*moved)._replace(cu_seqlens=self.cu_seqlens, parents=self.parents)

    @property
    def documents(self) -> dict[str, Tensor]:
        """How documents lie, as keywords of a call."""
        tree = {"parents": self.parents} if bool((self.parents >= 0).any()) else {}
        return {"cu_seqlens": self.cu_seqlens, **tree}

    def half(self, number: int) -> GroupBatch:
        """The first sequences alone (0), or the second ones (1), of a batch that shares nothing."""
        n = len(self.good)
        assert len(self.parents) == 2 * n
        bounds = self.cu_seqlens[number * n : (number + 1) * n + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        return GroupBatch(
            self.input_ids[:, tokens],
            self.shift_labels[:, tokens],
            bounds - bounds[0],
            self.parents[:n],
            self.sequences[:n],
            self.good,
            self.reference.chunk(2)[number],
        )


class Groups(Documents):
    """Documents that are groups. Rows of theirs hold whole groups.

    `shares` says whether batches may have documents that two continue.
    """

    shares = False

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

    def shared(self, rows: Iterable[Row]) -> list[int]:
        """Of each group how many tokens its batch, of these rows, computes once for both sequences."""
        groups = [self._sequences(piece) for row in rows for piece in row]
        shared = [self._common(*group) if self.shares else 0 for group in groups]
        total = sum(stop - start for group in groups for start, stop in group)
        return shared if sum(shared) >= SPARED * total else [0] * len(groups)

    def _common(self, first: tuple[int, int], second: tuple[int, int]) -> int:
        """The tokens that both begin with and that are not learned, but for the last of them."""
        length = min(stop - start for start, stop in (first, second))
        (a, a_trained), (b, b_trained) = (self._read(start, start + length) for start, _ in (first, second))
        same = (a == b) & ~a_trained & ~b_trained
        return max(0, int(same.long().cumprod(0).sum()) - 1)

    def batch(self, rows: Sequence[Row]) -> GroupBatch:
        """Rows as one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        places = [self._place(piece) for piece in pieces]
        bounds, parents, ends = _laid_out([self._sequences(p) for p in pieces], self.shared(rows))
        ids, labels, lengths = [], [], [0]
        for start, stop in bounds:
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
            torch.tensor(parents, dtype=torch.int32),
            torch.tensor(ends),
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


def _laid_out(
    groups: list[list[tuple[int, int]]], shared: list[int]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """First token and end of each document, the one that each continues, and those in which the groups'
    first and then second sequences end.
    """
    n = len(groups)
    if not any(shared):
        return [*itertools.chain(*zip(*groups, strict=True))], [-1] * 2 * n, [*range(2 * n)]
    bounds: list[tuple[int, int]] = []
    parents: list[int] = []
    for group, once in zip(groups, shared, strict=True):  # what continues a document follows it at once
        parent = len(bounds) if once else -1
        if once:
            bounds.append((group[0][0], group[0][0] + once))
            parents.append(-1)
        bounds += [(start + once, stop) for start, stop in group]
        parents += [parent, parent]
    ends = list(itertools.accumulate(2 + (once > 0) for once in shared))
    return bounds, parents, [end - 2 for end in ends] + [end - 1 for end in ends]


def _groups(corpus: Corpus) -> Tensor:
    assert corpus.groups is not None
    return corpus.groups


def _reference(corpus: Corpus) -> Tensor:
    if corpus.reference is None:
        corpus.reference = torch.full((len(corpus), 2), torch.nan)
    return corpus.reference
