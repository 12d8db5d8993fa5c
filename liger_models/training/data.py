"""Text files to packed rows of tokens: no token lost, no random choice that the seed does not fix.

    files -> records -> tokens [N] with a mark on each that is trained -> rows of seq_len inputs -> batches

A document of n tokens holds n - 1 pairs of an input and the label that follows it, and packing lays out
those pairs: every position of a row is an input with its label beside it (`shift_labels`), so that a
document cut at the end of a row loses context but no label, and the last token of a document, after which
nothing follows, takes no place.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError, abbreviate
from liger_models.training.tokenizer import TextTokenizer

IGNORE = -100
TEXT_SUFFIXES = (".txt", ".md")
FORMS = ("text", "prompt/completion", "messages")


class Record(NamedTuple):
    """One example and where it stands; `content` is a str, a (prompt, completion) pair or messages."""

    where: str
    form: str
    content: Any


class Piece(NamedTuple):
    """The inputs tokens[start:stop] of one document; their labels are tokens[start + 1 : stop + 1]."""

    start: int
    stop: int


Row = list[Piece]


class Batch(NamedTuple):
    """A micro-batch: rows laid end to end as one packed row of T tokens."""

    input_ids: Tensor  # [1, T] int64
    shift_labels: Tensor  # [1, T] int64, the token after each input; -100 where it is not trained
    cu_seqlens: Tensor  # [documents + 1] int32, on the CPU: to read it there costs no synchronisation

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return self
        ids, labels = (t.pin_memory().to(device, non_blocking=True) for t in self[:2])
        return Batch(ids, labels, self.cu_seqlens)


@dataclass
class Documents:
    """Tokenized documents, one after another.

    tokens   [N] int32; document d is tokens[starts[d] : starts[d + 1]]
    trained  [N] bool: the loss counts this token (never the first of a document: nothing precedes it)
    whole    documents that must not be cut at a row's end: an answer without its prompt teaches nothing
    counts   what was read, and what was left out, for the user to see
    """

    tokens: Tensor
    trained: Tensor
    starts: list[int]
    whole: list[bool]
    counts: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.whole)

    def longest_piece(self, seq_len: int) -> int:
        """The most inputs of one document in a row."""
        return min(seq_len, max(b - a - 1 for a, b in itertools.pairwise(self.starts)))

    def labels(self, piece: Piece) -> Tensor:
        start, stop = piece.start + 1, piece.stop + 1
        ids = self.tokens[start:stop].long()
        return torch.where(self.trained[start:stop], ids, IGNORE)

    def count_labels(self, rows: Iterable[Row]) -> int:
        return sum(int(self.trained[p.start + 1 : p.stop + 1].sum()) for row in rows for p in row)

    def select(self, chosen: Sequence[int]) -> Documents:
        """The documents with these numbers, in this order."""
        spans = [(self.starts[d], self.starts[d + 1]) for d in chosen]
        starts = [0]
        for start, stop in spans:
            starts.append(starts[-1] + stop - start)
        return Documents(
            torch.cat([self.tokens[start:stop] for start, stop in spans]),
            torch.cat([self.trained[start:stop] for start, stop in spans]),
            starts,
            [self.whole[d] for d in chosen],
            Counter(documents=len(chosen), tokens=starts[-1]),
        )

    def fingerprint(self) -> str:
        """A digest of all of it: the same data, tokenizer and options, or not."""
        digest = hashlib.sha256(repr((self.starts, self.whole)).encode())
        for tensor in (self.tokens, self.trained.view(torch.uint8)):
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def rows(self, seq_len: int, order: Iterable[int]) -> Iterator[Row]:
        """Pack the documents in this order into rows of `seq_len` inputs.

        Text fills each row to the last place and goes on in the next. A document that must stay whole opens
        a new row if the current one has no room for it; rows are then shorter, never padded.
        """
        row: Row = []
        room = seq_len
        for d in order:
            start, stop = self.starts[d], self.starts[d + 1] - 1
            if self.whole[d] and stop - start > room:
                yield row
                row, room = [], seq_len
            while start < stop:
                taken = min(room, stop - start)
                row.append(Piece(start, start + taken))
                start, room = start + taken, room - taken
                if room == 0:
                    yield row
                    row, room = [], seq_len
        if row:
            yield row

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows as one packed micro-batch."""
        pieces = [piece for row in rows for piece in row]
        lengths = torch.tensor([0] + [p.stop - p.start for p in pieces])
        return Batch(
            torch.cat([self.tokens[p.start : p.stop] for p in pieces]).long()[None],
            torch.cat([self.labels(p) for p in pieces])[None],
            lengths.cumsum(0).int(),
        )


class Position(NamedTuple):
    """How far training has read: the next row is number `row` of `epoch`."""

    epoch: int
    row: int


START = Position(0, 0)


class Stream:
    """Packed rows without end: an epoch is every document once, packed and shuffled by (seed, epoch)."""

    def __init__(self, documents: Documents, seq_len: int, seed: int, position: Position = START) -> None:
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.position = position
        self._rows = self._from(position)

    def epoch(self, number: int) -> list[Row]:
        # One generator for both numbers: epoch e of seed s must not be epoch e - 1 of seed s + 1.
        key = hashlib.sha256(f"{self.seed} {number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        rows = list(self.documents.rows(self.seq_len, order))
        # A long document fills many rows, one after another; a step should see several documents.
        return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]

    def count_rows(self, epochs: float) -> int:
        """Rows in this many epochs; half an epoch is half its rows."""
        whole = int(epochs)
        rows = sum(len(self.epoch(e)) for e in range(whole))
        if epochs > whole:
            rows += max(1, round((epochs - whole) * len(self.epoch(whole))))
        return rows

    def take(self, count: int) -> list[Row]:
        rows = []
        for _ in range(count):
            row, self.position = next(self._rows)
            rows.append(row)
        return rows

    def _from(self, position: Position) -> Iterator[tuple[Row, Position]]:
        epoch, skip = position
        while True:
            for number, row in enumerate(self.epoch(epoch)):
                if number >= skip:
                    yield row, Position(epoch, number + 1)
            epoch, skip = epoch + 1, 0


def load_documents(
    files: Sequence[str], tokenizer: TextTokenizer, *, seq_len: int, vocab_size: int, truncate: bool = False
) -> Documents:
    """Read and tokenize files.

    .txt and .md files are one document each. A .jsonl file has one record a line: `{"text": ...}`, or
    `{"prompt": ..., "completion": ...}`, or `{"messages": [{"role": ..., "content": ...}, ...]}`, and other
    fields are left aside and counted. Text is trained throughout; where there is a prompt, only the
    completion or what the assistant says. Text of any length is cut into rows; an example with a prompt must
    fit in `seq_len`, or `truncate` says to cut it. An end-of-sequence token closes each text and completion.

    Raises DataError, with file and line, for what cannot be used: a missing or empty file, an unknown
    suffix, text that is not UTF-8, a line that is not a JSON object of a known form, a token outside
    `vocab_size`, an example that is too long, and for data in which nothing can be trained.
    """
    counts: Counter[str] = Counter()
    build = _Builder(tokenizer, seq_len, vocab_size, truncate, counts)
    for path in files:
        texts: list[Record] = []
        records = 0
        for record in _read(local_path(path, DataError), counts):
            records += 1
            if record.form == "text":
                texts.append(record)
                if len(texts) == 1024:  # enough to keep the tokenizer's threads busy
                    build.add_texts(texts)
                    texts = []
            else:
                build.add_texts(texts)  # keeps the documents in the order of the file
                texts = []
                build.add_example(record)
        build.add_texts(texts)
        if records == 0:
            raise DataError(f"{path} is empty; expected text or JSON lines")
    return build.finish(files)


def split(documents: Documents, fraction: float, seed: int) -> tuple[Documents, Documents]:
    """Documents for training and held-out ones: at random, `fraction` of them, at least one of each."""
    total = len(documents)
    if total < 2:
        raise DataError(
            f"eval_fraction holds out whole documents and the data has {total}; give a held-out file "
            "instead, or JSONL with several documents"
        )
    held = min(max(1, round(fraction * total)), total - 1)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    return documents.select(sorted(order[held:])), documents.select(sorted(order[:held]))


class _Builder:
    def __init__(
        self, tokenizer: TextTokenizer, seq_len: int, vocab_size: int, truncate: bool, counts: Counter[str]
    ) -> None:
        self.tokenizer, self.seq_len, self.vocab_size = tokenizer, seq_len, vocab_size
        self.truncate, self.counts = truncate, counts
        self.tokens, self.trained, self.starts = array("i"), bytearray(), [0]
        self.whole: list[bool] = []

    def add_texts(self, records: list[Record]) -> None:
        ids = self.tokenizer.encode_batch([record.content for record in records])
        for record, document in zip(records, ids, strict=True):
            if not record.content:
                document = []
            else:
                self._close(document)
            self._add(record, document, [True] * len(document), whole=False)

    def add_example(self, record: Record) -> None:
        if record.form == "messages":
            try:
                text, spans = self.tokenizer.render(record.content)
            except DataError as error:
                raise DataError(f"{record.where}: {error}") from error
            _check_text(record.where, text)
            ids, trained = self.tokenizer.encode_spans(text, spans, add_special_tokens=False)
        else:
            prompt, completion = record.content
            # Encoded as one text: some tokenizers would put a space before a completion that comes alone.
            text = prompt + completion
            ids, trained = self.tokenizer.encode_spans(
                text, [(len(prompt), len(text))], add_special_tokens=True
            )
            trained += [False] * self._close(ids)
            trained[-1] = True
        length = len(ids) - 1
        if length > self.seq_len:
            if not self.truncate:
                raise DataError(
                    f"{record.where}: the example has {length} positions and seq_len is {self.seq_len}; "
                    "raise --seq-len, shorten it, or cut such examples with --truncate"
                )
            self.counts["truncated"] += 1
            ids, trained = ids[: self.seq_len + 1], trained[: self.seq_len + 1]
        self._add(record, ids, trained, whole=True)

    def finish(self, files: Sequence[str]) -> Documents:
        if not self.whole:
            raise DataError(f"nothing to train on in {', '.join(files)}: {describe(self.counts)}")
        # frombuffer shares memory with the array, which the tensor keeps alive
        tokens = torch.frombuffer(self.tokens, dtype=torch.int32)
        trained = torch.frombuffer(self.trained, dtype=torch.bool)
        self.counts["documents"], self.counts["tokens"] = len(self.whole), len(self.tokens)
        self.counts["labels"] = int(trained.sum())
        return Documents(tokens, trained, self.starts, self.whole, self.counts)

    def _close(self, ids: list[int]) -> int:
        """Append eos unless the tokenizer did; returns how many tokens that took."""
        eos = self.tokenizer.eos_id
        if eos is None:
            raise DataError(
                f"the tokenizer in {self.tokenizer.folder} names no end-of-sequence token, so documents "
                "cannot be told "
                'apart; set "eos_token" in tokenizer_config.json'
            )
        if ids and ids[-1] == eos:
            return 0
        ids.append(eos)
        return 1

    def _add(self, record: Record, ids: list[int], trained: list[bool], whole: bool) -> None:
        if ids and max(ids) >= self.vocab_size:
            worst = max(ids)
            raise DataError(
                f"{record.where}: token {self.tokenizer.backend.id_to_token(worst)!r} has id {worst} and "
                f"the model's vocabulary has {self.vocab_size} entries; use the tokenizer that belongs to "
                "the model"
            )
        if not any(trained[1:]):
            self.counts["without anything to train, left out"] += 1
            return
        self.tokens.extend(ids)
        self.trained.append(0)
        self.trained.extend(trained[1:])
        self.starts.append(len(self.tokens))
        self.whole.append(whole)


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in counts.items()) or "no records"


def _read(path: Path, counts: Counter[str]) -> Iterator[Record]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        what = "is a folder; name its files" if path.is_dir() else what
        raise DataError(f"data file {path} {what}")
    if path.suffix in TEXT_SUFFIXES:
        try:
            text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from error
        if text.strip():
            yield Record(str(path), "text", text)
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse(f"{path}, line {number}", line, counts)
                else:
                    counts["blank lines"] += 1
    else:
        raise DataError(f"data file {path} has suffix {path.suffix!r}; expected .txt, .md or .jsonl")


def _parse(where: str, line: bytes, counts: Counter[str]) -> Record:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: found a {type(record).__name__}, expected a JSON object")
    forms = [form for form in FORMS if any(key in record for key in form.split("/"))]
    if len(forms) != 1:
        found = ", ".join(map(repr, record)) or "no fields"
        raise DataError(f"{where}: found {found}; expected exactly one of {', '.join(FORMS)}")
    form = forms[0]
    keys = form.split("/")
    if missing := [key for key in keys if key not in record]:
        raise DataError(f"{where}: {keys[0]!r} and {keys[-1]!r} come together; {missing[0]!r} is missing")
    for key in record.keys() - set(keys):
        counts[f"fields {key!r} left aside"] += 1
    if form == "messages":
        return Record(where, form, _check_messages(where, record["messages"]))
    for key in keys:
        if not isinstance(record[key], str):
            raise DataError(f"{where}: {key!r} is a {type(record[key]).__name__}, expected a string")
        _check_text(where, record[key])
    return Record(where, form, record["text"] if form == "text" else (record["prompt"], record["completion"]))


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is half of a surrogate pair, which no text holds"
        ) from error


def _check_messages(where: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise DataError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    if any("content" not in m and "tool_calls" not in m for m in messages):
        raise DataError(f"{where}: a message has neither 'content' nor 'tool_calls'")
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if not isinstance(role, str):
            raise DataError(f"{where}: the role of message {number} is {abbreviate(role)}, expected a name")
        # Templates would write the word "None", and a model would learn to say it.
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"{where}: the content of message {number} ({role}) is {abbreviate(content)}; expected text, "
                "or tool_calls beside it"
            )
    if not any(m["role"] == "assistant" for m in messages):
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to train on")
    return messages


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor, without numpy, which is no dependency."""
    tensor = tensor.contiguous()
    size = tensor.numel() * tensor.element_size()
    buffer = (ctypes.c_char * size).from_address(
        tensor.data_ptr() if size else ctypes.addressof(ctypes.c_char())
    )
    buffer.owner = tensor  # type: ignore[attr-defined]  # the view lives as long as the tensor's memory
    return memoryview(buffer)
