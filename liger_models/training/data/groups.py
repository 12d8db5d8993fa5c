"""Groups of two sequences, which preferences and judgements are made of: two answers with their prompt, or
one with a stranger beside it (KTO).

A corpus holds a group as one document, the tokens of its sequences one after another, and so it stays in one
row and comes once an epoch. All its tokens are inputs, also a sequence's last, whose hidden state a reward is
read from. In a batch the groups' first sequences come first, then the second ones in the same order: losses
take them apart with `.chunk(2)`.

Where an objective can, what both sequences of a group begin with is computed once, if that spares enough: it
is a document of its own, up to its last token but one, and theirs continue it (losses/shared_prompts.py).
With images that is done where all of them stand there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.layers.vision.packing import ON_HOST, Seen, pack_seen, part_of, said_of
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.documents import IGNORE, Counts, Documents
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.pictured import are_alike, part_images
from liger_models.training.data.records import LABELLED

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
    following: Tensor  # [1, T] int64: labels of all that can be said, trained or not; -100 elsewhere
    images: tuple[dict[str, Tensor], ...]  # further keywords of the call; of labelled answers, of each half's

    def pinned(self) -> GroupBatch:
        """In memory from which a GPU copies while the host goes on."""
        return self._mapped(lambda x: x.pin_memory())

    def to(self, device: torch.device) -> GroupBatch:
        if device.type != "cuda":
            return self
        stay = ON_HOST | {"cu_seqlens", "parents"}
        return self._mapped(lambda x: x.pin_memory().to(device, non_blocking=True), stay)

    def _mapped(self, function: Callable[[Tensor], Tensor], stay: Set[str] = frozenset()) -> GroupBatch:
        """With what a function makes of all tensors but some."""

        def mapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: x if name in stay else function(x) for name, x in tensors.items()}

        own = self._asdict()
        images = tuple(mapped(call) for call in own.pop("images"))
        return GroupBatch(**mapped(own), images=images)

    @property
    def documents(self) -> dict[str, Tensor]:
        """How documents lie and what they show, as keywords of a call."""
        tree = {"parents": self.parents} if bool((self.parents >= 0).any()) else {}
        (images,) = self.images
        return {"cu_seqlens": self.cu_seqlens, **tree, **images}

    def calls(self) -> list[GroupBatch]:
        """What is to be one call each."""
        return [self] if len(self.images) == 1 else [self.half(0), self.half(1)]

    def half(self, number: int) -> GroupBatch:
        """The first sequences alone (0), or the second ones (1), of labelled answers."""
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
            self.following[:, tokens],
            self.images[number : number + 1],
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
        following = sum(int(self._said(*bounds)[1:].sum()) for bounds in sides[0])
        return Counts(lengths, sum(labels), len(found), labels[0], following)

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
        common = max(0, int(same.long().cumprod(0).sum()) - 1)
        corpus, base = self._corpus_at(first[0])
        names = corpus.image_names(first[0] - base)
        if not are_alike(names):
            return 0
        later = [self._said(start + common, stop) for start, stop in (first, second)] if names else []
        return common if all(bool(said.all()) for said in later) else 0

    def _said(self, start: int, stop: int) -> Tensor:
        """Which of these tokens can be said, [stop - start] bool."""
        tokens, trained = self._read(start, stop)
        if self.vision is None:
            return torch.ones_like(trained)
        corpus, base = self._corpus_at(start)
        return said_of(self.vision, tokens.long(), trained, bool(corpus.image_names(start - base)))

    def batch(self, rows: Sequence[Row]) -> GroupBatch:
        """Rows as one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        places = [self._place(piece) for piece in pieces]
        groups = [self._sequences(piece) for piece in pieces]
        documents, ends = _laid_out(groups, self.shared(rows))
        ids, labels, following, lengths, seen = [], [], [], [0], []
        shown = [self._shown(piece) for piece in pieces]
        for start, stop, _, group, side in documents:
            tokens, trained = self._read(start, stop)
            ids.append(tokens.long())
            nothing = torch.tensor([IGNORE])
            said = self._said(start, stop)
            labels.append(torch.cat([ids[-1][1:].where(trained[1:], IGNORE), nothing]))
            following.append(torch.cat([ids[-1][1:].where(said[1:], IGNORE), nothing]))
            lengths.append(stop - start)
            first = groups[group][side][0]
            seen.append(Seen(ids[-1], trained, part_of(shown[group][side], start - first, stop - first)))
        parents = [document.parent for document in documents]
        reference = torch.stack([_reference(corpus)[document] for corpus, document in places])
        return GroupBatch(
            torch.cat(ids)[None],
            torch.cat(labels)[None],
            torch.tensor(lengths).cumsum(0).int(),
            torch.tensor(parents, dtype=torch.int32),
            torch.tensor(ends),
            torch.stack([_groups(corpus)[document, 1] for corpus, document in places]).bool(),
            reference.T.flatten(),
            torch.cat(following)[None],
            self._keywords(seen, parents),
        )

    def _shown(self, piece: Piece) -> list[dict[str, Tensor]]:
        """What the processor gave of the images of both sequences."""
        if self.vision is None:
            return [{}, {}]
        corpus, base = self._corpus_at(piece.start)
        return part_images(corpus.images(piece.start - base))

    def _keywords(self, seen: list[Seen], parents: list[int]) -> tuple[dict[str, Tensor], ...]:
        """Of a call on these documents, or of two, each on half of them, which continue none."""
        labelled, half = any(part.corpus.form == LABELLED for part in self.parts), len(seen) // 2
        if self.vision is None:
            return ({},) * (1 + labelled)
        if labelled:
            return tuple(pack_seen(self.vision, side) for side in (seen[:half], seen[half:]))
        return (pack_seen(self.vision, seen, parents),)

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


class _Document(NamedTuple):
    """First token and end, the document that it continues, or -1, and of which group and sequence it is."""

    start: int
    stop: int
    parent: int
    group: int
    side: int


def _laid_out(groups: list[list[tuple[int, int]]], shared: list[int]) -> tuple[list[_Document], list[int]]:
    """The documents, and those in which the groups' first and then second sequences end."""
    n = len(groups)
    if not any(shared):
        sides = [_Document(*groups[group][side], -1, group, side) for side in (0, 1) for group in range(n)]
        return sides, [*range(2 * n)]
    documents: list[_Document] = []
    for number, (group, once) in enumerate(zip(groups, shared, strict=True)):
        parent = len(documents) if once else -1
        if once:  # what continues a document follows it at once
            documents.append(_Document(group[0][0], group[0][0] + once, -1, number, 0))
        documents += [_Document(a + once, b, parent, number, side) for side, (a, b) in enumerate(group)]
    ends = list(itertools.accumulate(2 + (once > 0) for once in shared))
    return documents, [end - 2 for end in ends] + [end - 1 for end in ends]


def _groups(corpus: Corpus) -> Tensor:
    assert corpus.groups is not None
    return corpus.groups


def _reference(corpus: Corpus) -> Tensor:
    if corpus.reference is None:
        corpus.reference = torch.full((len(corpus), 2), torch.nan)
    return corpus.reference
