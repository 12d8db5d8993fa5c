"""Preview of training data: tokens and their loss marks, of the first records or of packed rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers.decoders import DecodeStream

from liger_models.images import Preprocessor
from liger_models.training.data.documents import Documents
from liger_models.training.data.encoding import Encoded, Encoder
from liger_models.training.data.pictured import PicturedEncoder
from liger_models.training.data.reading.records import TRAIN_ON
from liger_models.training.data.reading.schema import FORMS, LABELLED, PAIRS, Schema, parse_columns
from liger_models.training.data.reading.sources import find_sources, with_split
from liger_models.training.data.stream import Stream
from liger_models.training.text.tokenizer import TextTokenizer


class Shown(NamedTuple):
    """A sequence of tokens with a title, and for each whether it is trained on."""

    title: str
    ids: list[int]
    trained: list[bool]


def preview_records(
    names: Sequence[str],
    tokenizer: TextTokenizer,
    records: int,
    counts: Counter[str],
    *,
    train_on: str = TRAIN_ON[0],
    images: Preprocessor | None = None,
    form: str | None = None,
    columns: str | None = None,
    split: str | None = None,
) -> Iterator[Shown]:
    """Yield the sequences of the first `records` records, as a corpus would hold them; the arguments are
    those of `load_documents`.

    Raises:
        DataError: unusable data, with file and line.
    """
    schema = Schema((form,) if form else FORMS, parse_columns(columns), tokenizer.has_chat_template)
    sources = [source for name in with_split(names, split) for source in find_sources(name, counts)]
    read = (r for source in sources for r in source.records(counts, lambda _: None, schema))
    with PicturedEncoder(tokenizer, images) as pictured:
        encoder = Encoder(tokenizer, pictured, train_on)
        for batch in encoder.encode(itertools.islice(read, records)):
            for encoded in batch:
                yield from _sequences(encoded)
    counts += encoder.counts


def preview_rows(documents: Documents, seq_len: int, seed: int, rows: int) -> Iterator[list[Shown]]:
    """Yield the first packed rows, each a list of its pieces."""
    stream = Stream(documents, seq_len, seed)
    last = int(all(part.corpus.form is None for part in documents.parts))  # a group has no token beyond it
    for number, row in enumerate(stream.take(rows), 1):
        shown, place = [], 0
        for start, stop in row:
            ids, trained = documents.read(start, stop + last)
            title = f"row {number}, positions {place:,} to {place + stop - start - 1:,}"
            shown.append(Shown(title, ids.tolist(), trained.tolist()))
            place += stop - start
        yield shown


def _sequences(encoded: Encoded) -> Iterator[Shown]:
    record, ids, trained = encoded.record, encoded.ids, [bool(mark) for mark in encoded.trained]
    if encoded.group is None:
        yield Shown(record.where, ids, trained)
        return
    cut, good = encoded.group
    names = {PAIRS: ("chosen", "rejected"), LABELLED: ("good" if good else "bad", "another record's answer")}
    for name, part in zip(names[record.form], (slice(cut), slice(cut, None)), strict=True):
        yield Shown(f"{record.where}, {name}", ids[part], trained[part])


def pieces_of_text(tokenizer: TextTokenizer, shown: Shown) -> Iterator[tuple[str, bool]]:
    """Yield (text, trained) of each token, special tokens included; tokens that share a character come
    together, with the mark of the last.
    """
    stream = DecodeStream(skip_special_tokens=False)
    text, mark = None, False
    for token, mark in zip(shown.ids, shown.trained, strict=True):
        if text := stream.step(tokenizer.backend, token):
            yield _visible(text), mark
    if shown.ids and not text:
        yield "\N{REPLACEMENT CHARACTER}", mark  # the sequence ends within a character


def _visible(text: str) -> str:
    """Replace control characters, which could control the terminal, by their escapes."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)
