"""Encoding of records to token ids and loss marks, in batches.

Batches keep the tokenizer's threads busy, and their size is bounded to limit memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from liger_models.convert.errors import DataError
from liger_models.training.data.pictured import PicturedEncoder, Tokens
from liger_models.training.data.reading.lines import BLOCK, LONG_TEXT, OVERLAP
from liger_models.training.data.reading.records import (
    LONG,
    TRAIN_ON,
    Conversation,
    Record,
    check_text,
)
from liger_models.training.data.reading.schema import LABELLED, PAIRS
from liger_models.training.text.chat_template import Rendering, merged
from liger_models.training.text.tokenizer import TextTokenizer

BATCH_RECORDS = 1024  # enough to keep the tokenizer's threads busy
BATCH_CHARACTERS = 1 << 22
CHECKED = 64  # texts
SHARED_TOKEN = f"answers whose first token includes the end of the prompt (of the first {CHECKED})"
IMAGE_CHARACTERS = BATCH_CHARACTERS // 32  # a processed image takes some 20 MB


class Encoded(NamedTuple):
    """Encoded document of a record, or a piece of it if `more` follows."""

    record: Record
    ids: list[int]
    trained: bytes  # a byte for each of the ids
    whole: bool
    more: bool = False
    images: bytes = b""
    needed: tuple[int, ...] = ()  # per sequence: ids up to and including the last image token
    group: tuple[int, int] | None = None  # tokens of the first sequence, whether its answer is good
    dropped: Sequence[str] = ()  # answer contents that the chat template left out


class Encoder:
    """Encodes records to ids and loss marks, in batches.

    Attributes:
        counts: answers of the first `CHECKED` texts that share a token with their prompt.
    """

    def __init__(
        self, tokenizer: TextTokenizer, pictured: PicturedEncoder, train_on: str = TRAIN_ON[0]
    ) -> None:
        self.tokenizer, self.pictured, self.train_on = tokenizer, pictured, train_on
        self.last_answer: Any = None  # of labelled records
        self.counts: Counter[str] = Counter()
        self._unchecked = CHECKED

    def encode(self, records: Iterator[Record]) -> Iterator[list[Encoded]]:
        for batch in _batches(self._examples(records)):
            if batch[0].form == LONG:
                yield from ([piece] for piece in self._long(batch[0]))
            elif batch[0].form in (PAIRS, LABELLED):
                yield list(self._groups(batch))
            else:
                yield list(self._batch(batch))

    def _examples(self, records: Iterator[Record]) -> Iterator[Record]:
        """Expand conversations to examples, rendered if without images; yield other records unchanged."""
        for record in records:
            if record.form != "messages":
                yield record
                continue
            _check_size(record, _characters(record))
            examples = record.content.examples(self.train_on)
            parts: list[Any] = [one if one.images else self._rendered(record, one) for one in examples]
            if not record.images:
                parts = merged(parts)
            for number, part in enumerate(parts, 1):
                yield record._replace(content=part, examples_left=len(parts) - number)

    def _batch(self, records: list[Record]) -> Iterator[Encoded]:
        """Encode a batch by kind, in order."""
        texts = iter(self.tokenizer.encode_batch([r.content for r in records if r.form == "text"]))
        pairs = iter(self._encode_pairs([r for r in records if r.form == "prompt/completion"]))
        talks = iter(
            self._encode_talks([r.content for r in records if r.form == "messages" and not r.images])
        )
        shown = iter(self.pictured.encode([(r, [r.content]) for r in records if r.images]))
        for record in records:
            if record.images:
                made = next(shown)
                (one,) = made.sequences
                images: dict[str, Any] = {
                    "images": made.images,
                    "needed": (one.needed,),
                    "dropped": one.dropped,
                }
                yield Encoded(record, one.ids, one.trained, True, **images)
                continue
            if record.form == "text":
                ids = next(texts)
                if record.content:
                    self._close(ids)
                else:
                    ids = []
                yield Encoded(record, ids, bytes(1) + b"\1" * (len(ids) - 1), whole=False)
                continue
            ids, trained = next(talks if record.form == "messages" else pairs)
            if record.form == "prompt/completion":
                trained += [False] * self._close(ids)
                trained[-1] = True
            if ids:
                trained[0] = False
            dropped = record.content.dropped if record.form == "messages" else ()
            yield Encoded(record, ids, bytes(trained), whole=True, dropped=dropped)

    def _groups(self, records: list[Record]) -> Iterator[Encoded]:
        """Encode each record's two sequences, concatenated."""
        wanted = [(record, self._answers(record, records)) for record in records]
        with_images = [(r, [p.followed_by(a) for p, a in two]) for r, two in wanted if _have_images(two)]
        shown = iter(self.pictured.encode(with_images))
        texts = iter(
            self._encode_answers([(r, *one) for r, two in wanted if not _have_images(two) for one in two])
        )
        for record, two in wanted:
            images: dict[str, Any] = {}
            if _have_images(two):
                made = next(shown)
                first, second = made.sequences
                images = {"images": made.images, "needed": (first.needed, second.needed)}
            else:
                first, second = next(texts), next(texts)
            good = record.form == PAIRS or record.content[2]
            yield Encoded(
                record,
                first.ids + second.ids,
                first.trained + second.trained,
                True,
                group=(len(first.ids), int(good)),
                dropped=[*first.dropped, *(second.dropped if record.form == PAIRS else ())],
                **images,
            )

    def _answers(self, record: Record, records: list[Record]) -> list[tuple[Any, Any]]:
        """Return (prompt, answer) of each of the record's two sequences."""
        prompt, answer, other = record.content
        if record.form == LABELLED:
            if self.last_answer is None:
                self.last_answer = records[-1].content[1]
                if len(records) == 1:
                    raise DataError(
                        f"{record.where}: a single record; expected two at least, whose answers differ"
                    )
            answer, other, self.last_answer = answer, self.last_answer, answer
            if type(other) is not type(prompt):
                raise DataError(
                    f"{record.where}: this record is of {_kind_of(prompt)} and the one before of "
                    f"{_kind_of(other)}; expected records of one kind"
                )
        return [(prompt, answer), (prompt, other)]

    def _encode_answers(self, answers: list[tuple[Record, Any, Any]]) -> list[Tokens]:
        """Encode each (record, prompt, answer)."""
        texts, spans = [], []
        dropped: list[list[str]] = []
        for record, prompt, answer in answers:
            if isinstance(prompt, str):
                texts.append(prompt + answer)
                spans.append([(len(prompt), len(texts[-1]))])
                dropped.append([])
                continue
            rendering = self._rendered(record, prompt.followed_by(answer))
            texts.append(rendering.text)
            spans.append(rendering.spans)
            dropped.append(rendering.dropped)
        is_text = [isinstance(prompt, str) for _, prompt, _ in answers]
        found = []
        for kind in (True, False):
            chosen = [i for i, is_it in enumerate(is_text) if is_it is kind]
            encoded = self._encode_spans([texts[i] for i in chosen], [spans[i] for i in chosen], kind)
            found += list(zip(chosen, encoded, strict=True))
        encoded = [one for _, one in sorted(found, key=lambda pair: pair[0])]
        for (ids, trained), is_it in zip(encoded, is_text, strict=True):
            if is_it:
                trained += [False] * self._close(ids)
                trained[-1] = True
            if ids:
                trained[0] = False
        return [
            Tokens(ids, bytes(trained), 0, lost)
            for (ids, trained), lost in zip(encoded, dropped, strict=True)
        ]

    def _long(self, record: Record) -> Iterator[Encoded]:
        mark, last = b"\0", 0
        for ids in self.tokenizer.encode_blocks(record.content, OVERLAP):
            yield Encoded(record, ids, mark + b"\1" * (len(ids) - len(mark)), whole=False, more=True)
            mark, last = b"", ids[-1]
        end = [last]
        added = self._close(end)
        yield Encoded(record, end[1:], b"\1" * added, whole=False)

    def _encode_pairs(self, records: list[Record]) -> list[tuple[list[int], list[bool]]]:
        # Encoded as one text: some tokenizers would prepend a space to a separate completion.
        texts = ["".join(record.content) for record in records]
        spans = [[(len(r.content[0]), len(text))] for r, text in zip(records, texts, strict=True)]
        return self._encode_spans(texts, spans, True)

    def _encode_talks(self, renderings: list[Rendering]) -> list[tuple[list[int], list[bool]]]:
        return self._encode_spans([one.text for one in renderings], [one.spans for one in renderings], False)

    def _encode_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]], special: bool
    ) -> list[tuple[list[int], list[bool]]]:
        """Encode texts with answers at `spans`, and count answers that begin within a token: asked with the
        prompt alone, the model sees other tokens than in training.
        """
        encoded = self.tokenizer.encode_spans(texts, spans, add_special_tokens=special)
        for text, mine, (ids, _) in zip(texts, spans, encoded, strict=True):
            if not self._unchecked:
                break
            if mine and mine[0][0] > 0:
                self._unchecked -= 1
                [(prompt, _)] = self.tokenizer.encode_spans(
                    [text[: mine[0][0]]], [[]], add_special_tokens=special
                )
                if prompt[-1:] == [self.tokenizer.eos_id]:  # some tokenizers append it
                    prompt = prompt[:-1]
                self.counts[SHARED_TOKEN] += ids[: len(prompt)] != prompt
        return encoded

    def _rendered(self, record: Record, example: Conversation) -> Rendering:
        try:
            rendering = self.tokenizer.render(example.messages, example.given, record.options)
        except DataError as error:
            raise DataError(f"{record.where}: {error}") from error
        check_text(record.where, rendering.text)
        return rendering

    def _close(self, ids: list[int]) -> int:
        """Append eos unless the tokenizer did; return the number of tokens added."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise DataError(
                f"the tokenizer in {self.tokenizer.folder} names no end-of-sequence token, so documents "
                'cannot be told apart; set "eos_token" in tokenizer_config.json'
            )
        if ids and ids[-1] == eos:
            return 0
        ids.append(eos)
        return 1


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Group records in batches; a long text is a batch of its own."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        size = _characters(record)
        if size > LONG_TEXT and record.form == "text":
            record = record._replace(form=LONG, content=_blocks(record.content))
        if record.form == LONG:
            if batch:
                yield batch
            yield [record]
            batch, characters = [], 0
            continue
        _check_size(record, size)
        batch.append(record)
        characters += size + IMAGE_CHARACTERS * record.images
        if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_size(record: Record, size: int) -> None:
    if size > LONG_TEXT:
        raise DataError(
            f"{record.where}: the example has {size:,} characters, and is tokenized as a whole; expected "
            f"at most {LONG_TEXT:,}"
        )


def _blocks(text: str) -> Iterator[str]:
    """Yield a long text in blocks; each starts with the last `OVERLAP` characters of the previous one."""
    return (text[max(0, start - OVERLAP) : start + BLOCK] for start in range(0, len(text), BLOCK))


def _characters(value: Any) -> int:
    """Count the characters in a record, without images."""
    if isinstance(value, Record):
        return _characters(value.content) + _characters(value.options)
    if isinstance(value, Conversation):
        return _characters(value.messages)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


def _have_images(answers: list[tuple[Any, Any]]) -> bool:
    """Return whether a prompt or an answer has images."""
    return any(isinstance(part, Conversation) and part.images for one in answers for part in one)


def _kind_of(value: Any) -> str:
    return "text" if isinstance(value, str) else "messages"
