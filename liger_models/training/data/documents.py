"""Documents to train on, of one corpus or several: which there are, and batches of their tokens.

A document of n tokens holds n - 1 pairs of an input and the label that follows it, and packing lays out
those pairs: every position of a row is an input with its label beside it (`shift_labels`), so that a
document cut at the end of a row loses context but no label, and the last token of a document, after which
nothing follows, takes no place.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.training.data.corpus import Corpus
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.permutation import Permutation

IGNORE = -100
CHUNK = 1 << 16  # documents looked at together


class Batch(NamedTuple):
    """A micro-batch: rows laid end to end as one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the token after each input; -100 where it is not trained
    cu_seqlens: Tensor  # [documents + 1] int32, on the CPU: to read it there costs no synchronisation

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return self
        # Out of pinned memory the device copies while the host goes on.
        ids, labels = (t.pin_memory().to(device, non_blocking=True) for t in self[:2])
        return Batch(ids, labels, self.cu_seqlens)


@dataclass(frozen=True)
class Part:
    """Documents of one corpus: all, or `count` of them from place `first` of a random order.

    `weight` is its share of the tokens of a mixture, if it is part of one.
    """

    corpus: Corpus
    weight: float | None = None
    order: str | None = None  # the key of a permutation
    first: int = 0
    count: int = -1

    def __len__(self) -> int:
        return len(self.corpus) if self.order is None else self.count

    def bounds(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the documents at these places: first token, last token (which is no input), and `whole`."""
        if self.order is not None:
            places = Permutation(len(self.corpus), self.order)(places + self.first)
        return self.corpus.starts[places], self.corpus.starts[places + 1] - 1, self.corpus.whole[places]

    def all_bounds(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for first in range(0, len(self), CHUNK):
            yield self.bounds(torch.arange(first, min(first + CHUNK, len(self))))


class Documents:
    """The parts, whose tokens are counted as if they stood one after another. `counts` is what was read."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.counts: Counter[str] = Counter()
        self.bases = [0]
        for part in parts:
            self.bases.append(self.bases[-1] + part.corpus.manifest["tokens"])
            if part.order is None:
                self.counts.update(part.corpus.counts)
            else:
                tokens = sum(int((stop - start + 1).sum()) for start, stop, _ in part.all_bounds())
                self.counts.update(documents=len(part), tokens=tokens)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def longest_piece(self, seq_len: int) -> int:
        """The most inputs of one document in a row."""
        longest = max(int((b - a).max()) for part in self.parts for a, b, _ in part.all_bounds())
        return min(seq_len, longest)

    def inputs(self, piece: Piece) -> Tensor:
        """[stop - start] int64"""
        return self._read(piece.start, piece.stop)[0].long()

    def labels(self, piece: Piece) -> Tensor:
        """[stop - start] int64: what follows each input, or -100"""
        ids, trained = self._read(piece.start + 1, piece.stop + 1)
        return torch.where(trained, ids.long(), IGNORE)

    def count_labels(self, rows: Iterable[Row]) -> int:
        return sum(int(self._read(p.start + 1, p.stop + 1)[1].sum()) for row in rows for p in row)

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows as one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        lengths = torch.tensor([0] + [p.stop - p.start for p in pieces])
        return Batch(
            torch.cat([self.inputs(p) for p in pieces])[None],
            torch.cat([self.labels(p) for p in pieces])[None],
            lengths.cumsum(0).int(),
        )

    def fingerprint(self) -> str:
        """A digest of all of it: the same data, tokenizer and options, or not."""
        parts = [[p.corpus.digest, p.weight, p.order, p.first, p.count] for p in self.parts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        number = bisect_right(self.bases, start) - 1
        base = self.bases[number]
        return self.parts[number].corpus.read(start - base, stop - base)


def split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents for training and held-out ones: at random, `fraction` of each part, at least one."""
    total = len(documents)
    if total < 2:
        raise DataError(
            f"eval_fraction holds out whole documents and the data has {total}; give a held-out file "
            "instead, or JSONL with several documents"
        )
    kept, held = [], []
    for number, part in enumerate(documents.parts):
        count = min(max(1, round(fraction * len(part))), len(part) - 1)
        order = f"held out, {seed} {number}"
        kept.append(replace(part, order=order, first=count, count=len(part) - count))
        if count:  # a part of one document is trained on
            held.append(replace(part, order=order, first=0, count=count, weight=None))
    if not held:
        raise DataError("eval_fraction holds out whole documents and each part of the data has one alone")
    return Documents(kept), Documents(held)


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items()) or "no records"
