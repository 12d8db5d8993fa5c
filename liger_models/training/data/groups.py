"""Groups of two sequences for preference losses: a prompt with two answers, or an answer and an unrelated one
(KTO).

A corpus stores a group as one document, its sequences concatenated, so that it stays in one row and comes
once an epoch. All its tokens are inputs, including a sequence's last, whose hidden state gives the reward. A
batch has the groups' first sequences, then the second ones in the same order; losses split them with
`.chunk(2)`.

If the objective supports it and it saves enough, the common beginning of a group is computed once: it becomes
a document, up to its second-to-last token, and both sequences continue it (losses/shared_prompts.py). Groups
with images share it only if it contains all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.layers.vision.packing import (
    ON_HOST,
    VisionConversation,
    pack_conversations,
    part_of,
    predictable_tokens,
)
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.documents import IGNORE, Counts, Documents
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.pictured import are_alike, part_images
from liger_models.training.data.reading.schema import LABELLED

SPARED = 0.2  # of a batch's tokens: below this, tree attention does not pay


class GroupBatch(NamedTuple):
    """Micro-batch of n groups: D documents concatenated to one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the next token; -100 where not trained
    cu_seqlens: Tensor  # [D + 1] int32, on the CPU: reading it does not synchronise
    parents: Tensor  # [D] int32, on the CPU: the document continued, or -1
    sequences: Tensor  # [2 n] int64: the last document of each sequence
    good: Tensor  # [n] bool: whether the first sequence's answer is good
    reference: Tensor  # [2 n] float32: reference log-probabilities; nan if absent
    following: Tensor  # [1, T] int64: labels that can be generated, trained or not; else -100
    images: tuple[dict[str, Tensor], ...]  # further forward keywords; for labelled answers, one per half

    def pinned(self) -> GroupBatch:
        """Copy to pinned memory, for asynchronous transfer to a GPU."""
        return self._mapped(lambda x: x.pin_memory())

    def to(self, device: torch.device) -> GroupBatch:
        if device.type == "cpu":
            return self
        stay = ON_HOST | {"cu_seqlens", "parents"}
        return self._mapped(lambda x: to_device(x, device), stay)

    def _mapped(self, function: Callable[[Tensor], Tensor], stay: Set[str] = frozenset()) -> GroupBatch:
        """Apply a function to all tensors except those in `stay`."""

        def mapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: x if name in stay else function(x) for name, x in tensors.items()}

        own = self._asdict()
        images = tuple(mapped(call) for call in own.pop("images"))
        return GroupBatch(**mapped(own), images=images)

    @property
    def documents(self) -> dict[str, Tensor]:
        """Return the document bounds and images as forward keywords."""
        tree = {"parents": self.parents} if bool((self.parents >= 0).any()) else {}
        (images,) = self.images
        return {"cu_seqlens": self.cu_seqlens, **tree, **images}

    def calls(self) -> list[GroupBatch]:
        """Split into batches of one forward each."""
        return [self] if len(self.images) == 1 else [self.half(0), self.half(1)]

    def half(self, number: int) -> GroupBatch:
        """Return only the first (0) or second (1) sequences of labelled answers."""
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
    """Documents that are groups; their rows hold whole groups.

    `shares`: whether the sequences of a group may share a beginning in batches.
    """

    shares = False

    def longest_piece(self, seq_len: int) -> int:
        """Length of the longest sequence."""
        longest = 0
        for corpus in {id(part.corpus): part.corpus for part in self.parts}.values():
            first, total = _groups(corpus)[:, 0], corpus.starts.diff()
            longest = max(longest, int(torch.maximum(first, total - first).max()))
        return longest

    def count(self, rows: Iterable[Row]) -> Counts:
        found = [self._sequences(piece) for row in rows for piece in row]
        sides = list(zip(*found, strict=True))
        lengths = torch.tensor([stop - start for side in sides for start, stop in side])
        labels = [sum(int(self.read(*bounds)[1].sum()) for bounds in side) for side in sides]
        following = sum(int(self._said(*bounds)[1:].sum()) for bounds in sides[0])
        return Counts(lengths, sum(labels), len(found), labels[0], following)

    def shared(self, rows: Iterable[Row]) -> list[int]:
        """Return for each group in a batch of these rows how many tokens are computed once for both."""
        groups = [self._sequences(piece) for row in rows for piece in row]
        shared = [self._common(*group) if self.shares else 0 for group in groups]
        total = sum(stop - start for group in groups for start, stop in group)
        return shared if sum(shared) >= SPARED * total else [0] * len(groups)

    def _common(self, first: tuple[int, int], second: tuple[int, int]) -> int:
        """Length of the common beginning before any trained token, less one."""
        length = min(stop - start for start, stop in (first, second))
        (a, a_trained), (b, b_trained) = (self.read(start, start + length) for start, _ in (first, second))
        same = (a == b) & ~a_trained & ~b_trained
        common = max(0, int(same.long().cumprod(0).sum()) - 1)
        corpus, base = self._corpus_at(first[0])
        names = corpus.image_names(first[0] - base)
        if not are_alike(names):
            return 0
        later = [self._said(start + common, stop) for start, stop in (first, second)] if names else []
        return common if all(bool(said.all()) for said in later) else 0

    def _said(self, start: int, stop: int) -> Tensor:
        """Mask of tokens that can be generated, [stop - start] bool."""
        tokens, trained = self.read(start, stop)
        if self.vision is None:
            return torch.ones_like(trained)
        corpus, base = self._corpus_at(start)
        return predictable_tokens(self.vision, tokens.long(), trained, bool(corpus.image_names(start - base)))

    def batch(self, rows: Sequence[Row]) -> GroupBatch:
        """Concatenate rows to one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        places = [self._place(piece) for piece in pieces]
        groups = [self._sequences(piece) for piece in pieces]
        documents, ends = _laid_out(groups, self.shared(rows))
        ids, labels, following, lengths, seen = [], [], [], [0], []
        shown = [self._shown(piece) for piece in pieces]
        for start, stop, _, group, side in documents:
            tokens, trained = self.read(start, stop)
            ids.append(tokens.long())
            nothing = torch.tensor([IGNORE])
            said = self._said(start, stop)
            labels.append(torch.cat([ids[-1][1:].where(trained[1:], IGNORE), nothing]))
            following.append(torch.cat([ids[-1][1:].where(said[1:], IGNORE), nothing]))
            lengths.append(stop - start)
            first = groups[group][side][0]
            seen.append(
                VisionConversation(ids[-1], trained, part_of(shown[group][side], start - first, stop - first))
            )
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
        """Return the processed images of both sequences."""
        if self.vision is None:
            return [{}, {}]
        corpus, base = self._corpus_at(piece.start)
        return part_images(corpus.images(piece.start - base))

    def _keywords(self, seen: list[VisionConversation], parents: list[int]) -> tuple[dict[str, Tensor], ...]:
        """Return the image keywords of one call on these documents, or of two calls on half each if none
        continues another.
        """
        labelled, half = any(part.corpus.form == LABELLED for part in self.parts), len(seen) // 2
        if self.vision is None:
            return ({},) * (1 + labelled)
        if labelled:
            return tuple(pack_conversations(self.vision, side) for side in (seen[:half], seen[half:]))
        return (pack_conversations(self.vision, seen, parents),)

    def documents_of(self, rows: Iterable[Row]) -> list[int]:
        """Return the groups' numbers in their corpora, in the order of `batch`."""
        return [self._place(piece)[1] for row in rows for piece in row]

    def _place(self, piece: Piece) -> tuple[Corpus, int]:
        """Return the corpus and the document's number in it."""
        corpus, base = self._corpus_at(piece.start)
        return corpus, int(torch.searchsorted(corpus.starts, piece.start - base, right=True)) - 1

    def _sequences(self, piece: Piece) -> list[tuple[int, int]]:
        """Return (first token, end) of both sequences."""
        corpus, document = self._place(piece)
        cut = piece.start + int(_groups(corpus)[document, 0])
        return [(piece.start, cut), (cut, piece.stop)]


class _Document(NamedTuple):
    """Bounds of a document, the document that it continues or -1, and its group and sequence."""

    start: int
    stop: int
    parent: int
    group: int
    side: int


def _laid_out(groups: list[list[tuple[int, int]]], shared: list[int]) -> tuple[list[_Document], list[int]]:
    """Return the documents, and the last document of each first and then each second sequence."""
    n = len(groups)
    if not any(shared):
        sides = [_Document(*groups[group][side], -1, group, side) for side in (0, 1) for group in range(n)]
        return sides, [*range(2 * n)]
    documents: list[_Document] = []
    for number, (group, once) in enumerate(zip(groups, shared, strict=True)):
        parent = len(documents) if once else -1
        if once:  # continuations directly follow their document
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
