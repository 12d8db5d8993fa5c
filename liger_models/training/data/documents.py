"""Training documents of one or several corpora, and batches of their tokens.

A document of n tokens has n - 1 pairs of an input and the label that follows it. Rows are packed from these
pairs (`input_ids`, `shift_labels`). A document cut at the end of a row therefore loses context but no label,
and its last token takes no position.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.vision.packing import ON_HOST, VisionConversation, pack_conversations
from liger_models.training.data.corpora.corpus import Corpus
from liger_models.training.data.corpora.learned_tokens import LearnedTokens
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.permutation import Permutation

IGNORE = -100
CHUNK = 1 << 16  # documents per step of a scan


class Batch(NamedTuple):
    """Micro-batch: rows concatenated to one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the next token; -100 where not trained
    cu_seqlens: Tensor  # [documents + 1] int32, on the CPU: reading it does not synchronise
    images: dict[str, Tensor]  # further forward keywords
    parents: Tensor | None = None  # [2, documents] int64, on the CPU, where one continues another

    def pinned(self) -> Batch:
        """Copy to pinned memory, for asynchronous transfer to a GPU."""
        images = {name: x.pin_memory() for name, x in self.images.items()}
        ids, labels, bounds = (x.pin_memory() for x in (self.input_ids, self.shift_labels, self.cu_seqlens))
        return Batch(ids, labels, bounds, images, self.parents)

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        images = {name: x if name in ON_HOST else to_device(x, device) for name, x in self.images.items()}
        return self._replace(
            input_ids=to_device(self.input_ids, device),
            shift_labels=to_device(self.shift_labels, device),
            images=images,
        )

    @property
    def documents(self) -> dict[str, Tensor]:
        """Return the document bounds and images as forward keywords."""
        tree = {} if self.parents is None else {"parents": self.parents}
        return {"cu_seqlens": self.cu_seqlens, **tree, **self.images}


class Counts(NamedTuple):
    """Counts of a set of rows, the denominators of mean losses."""

    lengths: Tensor  # int64, of sequences that do not attend to one another; groups' first ones come first
    labels: int
    groups: int = 0
    first_labels: int = 0  # labels of the groups' first sequences
    first_said: int = 0  # their non-initial tokens that can be generated, trained or not
    shared: Tensor | None = None  # for each shared beginning, its tokens
    repeated: int = 0  # tokens of the lengths that rows do not repeat

    @property
    def inputs(self) -> int:
        return int(self.lengths.sum()) - self.repeated


@dataclass(frozen=True)
class Part:
    """Documents of one corpus: all, or `count` of them from position `first` of a random order.

    `weight` is its share of a mixture's tokens, if any.
    """

    corpus: Corpus
    weight: float | None = None
    order: str | None = None  # the key of a permutation
    first: int = 0
    count: int = -1

    def __len__(self) -> int:
        return len(self.corpus) if self.order is None else self.count

    def bounds(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return first token, last token (not an input) and `whole` of the documents at these positions. All
        tokens of a group are inputs, so its bound is the end of the last one.
        """
        if self.order is not None:
            places = Permutation(len(self.corpus), self.order)(places + self.first)
        starts, last = self.corpus.starts, int(self.corpus.form is None)
        return starts[places], starts[places + 1] - last, self.corpus.whole[places]

    def all_bounds(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for first in range(0, len(self), CHUNK):
            yield self.bounds(torch.arange(first, min(first + CHUNK, len(self))))


class Documents:
    """Parts with tokens numbered consecutively. `counts` are the statistics of reading them.

    `vision` is the spec of the model's vision part, and `blocks` reads further parts of streamed data
    (streaming.py).
    """

    blocks: Any = None

    def __init__(self, parts: Sequence[Part], vision: Any = None) -> None:
        self.parts, self.vision = list(parts), vision
        self.counts: Counter[str] = Counter()
        self.bases = [0]
        for part in parts:
            self.bases.append(self.bases[-1] + part.corpus.manifest["tokens"])
            if part.order is None:
                self.counts.update(part.corpus.counts)
            else:
                last = int(part.corpus.form is None)
                tokens = sum(int((stop - start + last).sum()) for start, stop, _ in part.all_bounds())
                self.counts.update(documents=len(part), tokens=tokens)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def append(self, part: Part) -> None:
        """Add a part after the others."""
        self.parts.append(part)
        self.bases.append(self.bases[-1] + part.corpus.manifest["tokens"])

    def drop_first(self) -> None:
        """Remove the first part. The tokens of the others keep their numbers."""
        del self.parts[0], self.bases[0]

    def longest_piece(self, seq_len: int) -> int:
        """Longest piece of one document in a row, or longest example of those that share tokens."""
        longest = max(
            part.corpus.longest_sequence() - 1
            if len(part.corpus.branches)
            else max(int((b - a).max()) for a, b, _ in part.all_bounds())
            for part in self.parts
        )
        return min(seq_len, longest)

    def inputs(self, piece: Piece) -> Tensor:
        """Input tokens, [stop - start] int64."""
        return self.read(piece.start, piece.stop)[0].long()

    def labels(self, piece: Piece) -> Tensor:
        """Next tokens, or -100, [stop - start] int64."""
        ids, trained = self.read(piece.start + 1, piece.stop + 1)
        return torch.where(trained, ids.long(), IGNORE)

    def count(self, rows: Iterable[Row]) -> Counts:
        pieces = [piece for row in rows for piece in row]
        labels = sum(int(self.read(p.start + 1, p.stop + 1)[1].sum()) for p in pieces)
        laid = self._laid_out(pieces)
        lengths = torch.tensor([stop - start + shared for start, stop, _, shared in laid])
        shared = torch.tensor([shared for *_, shared in laid if shared], dtype=torch.int64)
        return Counts(lengths, labels, shared=shared if len(shared) else None, repeated=int(shared.sum()))

    def batch(self, rows: Sequence[Row]) -> Any:
        """Concatenate rows to one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        laid = self._laid_out(pieces)
        lengths = torch.tensor([0] + [stop - start for start, stop, *_ in laid])
        conversations = [] if self.vision is None else [self._conversation(*one[:3]) for one in laid]
        parents = torch.tensor([[parent, shared] for *_, parent, shared in laid]).T
        return Batch(
            torch.cat([self.inputs(p) for p in pieces])[None],
            torch.cat([self.labels(p) for p in pieces])[None],
            lengths.cumsum(0).int(),
            pack_conversations(self.vision, conversations),
            parents if bool((parents[0] >= 0).any()) else None,
        )

    def _laid_out(self, pieces: Iterable[Piece]) -> list[tuple[int, int, int, int]]:
        """Return (first token, end, index of the document continued or -1, tokens continued) of each
        document in a call.
        """
        laid: list[tuple[int, int, int, int]] = []
        for start, stop in pieces:
            corpus, base = self._corpus_at(start)
            trunk, begin, parent, shared = len(laid), start, -1, 0
            for first, continued in corpus.branches_of(start - base, stop - base):
                laid.append((begin, base + first, parent, shared))
                begin, parent, shared = base + first, trunk, continued
            laid.append((begin, stop, parent, shared))
        return laid

    def have_images(self, rows: Iterable[Row]) -> bool:
        """Return whether a document of these rows has images."""
        if not any(part.corpus.has_images for part in self.parts):
            return False
        starts = (piece.start for row in rows for piece in row)
        return any(
            corpus.images_at(start - base) for start in starts for corpus, base in [self._corpus_at(start)]
        )

    def learned_tokens(self) -> LearnedTokens:
        """Special tokens of all parts, by their role in training."""
        return functools.reduce(operator.or_, (part.corpus.learned for part in self.parts))

    def fingerprint(self) -> str:
        """Digest of the data, tokenizer and options."""
        if self.blocks is not None:
            return str(self.blocks.fingerprint())
        parts = [[p.corpus.digest, p.weight, p.order, p.first, p.count] for p in self.parts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _conversation(self, start: int, stop: int, parent: int) -> VisionConversation:
        ids, learned = self.read(start, stop)
        corpus, base = self._corpus_at(start)
        return VisionConversation(ids.long(), learned, corpus.images(start - base) if parent < 0 else {})

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, trained) of [start, stop) within one document."""
        corpus, base = self._corpus_at(start)
        return corpus.read(start - base, stop - base)

    def _corpus_at(self, token: int) -> tuple[Corpus, int]:
        """Return the corpus of a token, and the number of that corpus's first token."""
        number = bisect_right(self.bases, token) - 1
        return self.parts[number].corpus, self.bases[number]


def split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Split into training and held-out documents: random ones of each part, with at most this fraction of its
    tokens, but at least one document.
    """
    total = len(documents)
    if total < 2:
        raise DataError(
            f"eval_fraction holds out whole documents and the data has {total}; pass a held-out file "
            "instead, or JSONL with several documents"
        )
    kept, held = [], []
    for number, part in enumerate(documents.parts):
        order = f"held out, {seed} {number}"
        whole = replace(part, order=order, first=0, count=len(part))
        count = min(max(1, _count_within(whole, fraction)), len(part) - 1)
        kept.append(replace(part, order=order, first=count, count=len(part) - count))
        if count:  # a part's only document is trained on
            held.append(replace(part, order=order, first=0, count=count, weight=None))
    if not held:
        raise DataError("eval_fraction holds out whole documents and each part of the data has only one")
    both = (type(documents)(parts, documents.vision) for parts in (kept, held))
    return next(both), next(both)


def _count_within(part: Part, fraction: float) -> int:
    """The number of documents from the part's first on with at most this fraction of its tokens."""
    left, count = fraction * int(part.corpus.starts[-1]), 0
    for start in range(0, len(part), CHUNK):
        first, last, _ = part.bounds(torch.arange(start, min(start + CHUNK, len(part))))
        sums = (last - first + int(part.corpus.form is None)).cumsum(0)
        within = int((sums <= left).sum())
        count, left = count + within, left - int(sums[-1])
        if within < len(sums):
            break
    return count


def describe(counts: Counter[str]) -> str:
    """Describe the data that was read, beginning with the part that is trained on."""
    main = "documents", "tokens", "labels"
    listed = sorted(counts.items(), key=lambda item: item[0] not in main)
    named = ((number, what[:-1] if number == 1 and what in main else what) for what, number in listed)
    return ", ".join(f"{number:,} {what}" for number, what in named) or "no records"
