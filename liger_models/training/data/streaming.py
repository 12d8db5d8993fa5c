"""Streamed data: read as it arrives, tokenized and packed block by block, and never stored as a whole.

    records -> blocks of `size` records -> a corpus each, removed after use -> rows, in the block's order

A block is to a stream what an epoch is to a corpus: documents are shuffled within it, and a position is the
number of a block and of a row in it. The end of the sources ends a block; the next one begins another pass.
One process of each node tokenizes, one block ahead; the others wait for the files. A checkpoint contains the
reader's state at the beginning of the position's block, from which that block is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError
from liger_models.training.data.ahead import ahead
from liger_models.training.data.corpora.corpus import Corpus, is_corpus
from liger_models.training.data.documents import Documents, Part
from liger_models.training.data.groups import Groups
from liger_models.training.data.packing import Piece, Row
from liger_models.training.data.reading.lines import Advance
from liger_models.training.data.reading.records import Record
from liger_models.training.data.reading.schema import Schema
from liger_models.training.data.reading.sources import STDIN, Source, split_weights
from liger_models.training.data.reading.tables import HUB, HubRows, commit_of, read_hub
from liger_models.training.data.stream import START, Position, Stream
from liger_models.training.data.tokenizing import NothingToTrain, Request

POLL = 0.05  # seconds between looks for a block that another process makes
STEPS_BEHIND = 3  # after so many further steps no process reads a block: they are one ahead, and meet in each


class Closed(Exception):
    """The stream was closed while a block was awaited or made."""


class RecordReader:
    """Records of sources, pass after pass.

    Args:
        state: where to begin, an earlier `state()`: the pass, the source, the records of it that were read,
            and for a hub data set also datasets' own state. Files are read again up to the place.
        closed: makes reading raise `Closed`.
    """

    def __init__(
        self,
        sources: list[Source],
        schema: Schema,
        commits: dict[str, str],
        state: dict[str, Any] | None,
        closed: threading.Event,
    ) -> None:
        self.sources, self.schema, self.commits, self.closed = sources, schema, commits, closed
        self.counts: Counter[str] = Counter()
        self.passes, self.source, self.read, hub = 0, 0, 0, None
        if state is not None:
            self.passes, self.source, self.read, hub = (
                state[k] for k in ("pass", "source", "records", "hub")
            )
        self._open(hub, skip=self.read)

    def state(self) -> dict[str, Any]:
        hub = None if self.hub is None else self.hub.state()
        return {"pass": self.passes, "source": self.source, "records": self.read, "hub": hub}

    def block(self, size: int) -> Iterator[Record]:
        """Yield up to `size` records, as many as are left of this pass."""
        for _ in range(size):
            while (record := next(self._records, None)) is None:
                if self.read == 0:
                    raise DataError(f"{self.sources[self.source].name} is empty; expected text or records")
                self.source, self.read = (self.source + 1) % len(self.sources), 0
                self.passes += self.source == 0
                self._open(None, skip=0)
                if self.source == 0:
                    return
            if self.closed.is_set():
                raise Closed
            self.read += 1
            yield record

    def _open(self, hub: dict[str, Any] | None, skip: int) -> None:
        source, advance = self.sources[self.source], _nothing
        self.hub: HubRows | None = None
        if source.name.startswith(HUB):
            self.hub = HubRows(source.name, self.commits[source.name], hub)
            self._records = read_hub(source.name, self.counts, advance, self.schema, self.hub)
            return
        self._records = source.records(self.counts, advance, self.schema)
        if sum(1 for _ in itertools.islice(self._records, skip)) < skip:
            raise DataError(f"{source.name} has fewer records than the {skip} that were read from it before")


class BlockRequest(Request):
    """Request for the corpora of a stream's blocks. Takes the arguments of `Request`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for source in self.sources:
            if source.name == STDIN:
                raise DataError("standard input cannot be streamed: its records cannot be read again")
        named = [source.name for source in self.sources if source.name.startswith(HUB)]
        self.commits = {name: commit_of(name) for name in named}
        self.block: Iterator[Record] = iter(())

    def fingerprint(self, size: int) -> str:
        """Digest of the sources (a data set's commit; a file's name and size), options and block size."""
        sources = [
            {"name": source.name, "commit": self.commits[source.name]}
            if source.name in self.commits
            else {"name": source.full_name(), "size": source.size()}
            for source in self.sources
        ]
        about = [self._about(), sources, size, self.limits.seq_len]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def build_block(self, folder: Path, reader: RecordReader, size: int) -> None:
        """Build the corpus of the reader's next records.

        Raises:
            NothingToTrain: they have no document.
        """
        self.block, self.counts = reader.block(size), reader.counts
        self.build(folder)
        reader.counts.clear()

    def _records(self, counts: Counter[str], advance: Advance) -> Iterator[Record]:
        return self.block

    def _identities(self) -> list[dict[str, Any]]:
        return []

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Advance]:
        yield _nothing


class Block(NamedTuple):
    """A block, and the reader's state before it, which only the process that reads knows."""

    number: int
    corpus: Corpus
    state: dict[str, Any] | None


class Blocks:
    """Iterator over the blocks of a stream after the first, in folders that only this run uses.

    Args:
        request: for the corpora.
        size: records of a block.
        folder: of the blocks; removed by `close`.
        builds: whether this process makes the blocks, or waits for another one of its node that does.
        number, state: the first block, and the reader's state before it.

    Attributes:
        first: the first block.
    """

    def __init__(
        self,
        request: BlockRequest,
        size: int,
        folder: Path,
        builds: bool,
        number: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.request, self.size, self.folder, self.builds = request, size, folder, builds
        self.closed = threading.Event()
        self._blocks: Generator[Block, None, None] = (
            ahead(self._build(number, state)) if builds else self._await(number)
        )
        self.first: Block | None = next(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return self._blocks

    def fingerprint(self) -> str:
        return self.request.fingerprint(self.size)

    def remove(self, number: int) -> None:
        """Remove a block's files; processes that have them mapped can go on reading them."""
        if self.builds:
            shutil.rmtree(self._place(number), ignore_errors=True)

    def close(self) -> None:
        self.closed.set()
        if self.builds:
            self._blocks.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another node's blocks
                self.folder.parent.rmdir()

    def _place(self, number: int) -> Path:
        return self.folder / f"block-{number}"

    def _build(self, number: int, state: dict[str, Any] | None) -> Iterator[Block]:
        request = self.request
        reader = RecordReader(request.sources, request.schema, request.commits, state, self.closed)
        while True:
            state, passes, place = reader.state(), reader.passes, self._place(number)
            while True:
                try:
                    request.build_block(place, reader, self.size)
                    break
                except NothingToTrain:
                    if reader.passes > passes + 1:  # a whole pass has nothing
                        raise
            corpus = Corpus(place)
            corpus.check(request.limits)
            yield Block(number, corpus, state)
            number += 1

    def _await(self, number: int) -> Generator[Block, None, None]:
        while True:
            while not is_corpus(self._place(number)):
                if self.closed.wait(POLL):
                    raise Closed
            yield Block(number, Corpus(self._place(number)), None)
            number += 1


class BlockStream(Stream):
    """Infinite stream of packed rows of blocks. `documents` holds the blocks in use.

    Args:
        documents: made of the first block, with `blocks`.
        position: in the first block.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, position: Position = START) -> None:
        self.documents, self.seq_len, self.seed, self.position = documents, seq_len, seed, position
        self.blocks: Blocks = documents.blocks
        first, self.blocks.first = self.blocks.first, None  # not held beyond its use
        assert first is not None
        self._filled = Stream(documents, seq_len, seed).efficiency()
        self.states = {first.number: first.state}
        self._passed: deque[tuple[int, int]] = deque()  # blocks, and the step in which each was used up
        self._steps = 0
        self._rows = self._of_blocks(itertools.chain([first], self.blocks), position)

    def efficiency(self) -> float:
        """Fraction of the positions in the first block's rows that hold an input."""
        return self._filled

    def take(self, count: int) -> list[Row]:
        rows = super().take(count)
        self._steps += 1
        while self._passed and self._passed[0][1] + STEPS_BEHIND <= self._steps:
            number, _ = self._passed.popleft()
            self.documents.drop_first()
            self.states.pop(number, None)
            self.blocks.remove(number)
        return rows

    def state(self, position: Position) -> dict[str, Any] | None:
        """State of the reader before the block of a position of one of the last steps."""
        return self.states[position.epoch]

    def _of_blocks(self, blocks: Iterator[Block], position: Position) -> Iterator[tuple[Row, Position]]:
        skip = position.row
        for block in blocks:
            part = Part(block.corpus, None)
            if block.number != position.epoch:
                self.documents.append(part)
            self.states[block.number] = block.state
            base = self.documents.bases[-2]
            rows = Stream(Documents([part]), self.seq_len, self.seed).epoch(block.number)
            for number, row in enumerate(rows):
                if number >= skip:
                    shifted = [Piece(piece.start + base, piece.stop + base) for piece in row]
                    yield shifted, Position(block.number, number + 1)
            self._passed.append((block.number, self._steps))
            skip = 0


def stream_documents(
    names: Sequence[str],
    make: Callable[[list[str]], BlockRequest],
    *,
    size: int,
    folder: Path,
    resumed: dict[str, Any] | None = None,
) -> Documents:
    """Documents of the first block of a stream, with its `blocks`.

    Args:
        names: sources, without weights and corpora.
        make: makes the request for sources.
        size: records of a block.
        folder: of the blocks.
        resumed: contents of a checkpoint's state.json.

    Raises:
        DataError: unusable data.
    """
    names, weights = split_weights(names)
    if weights:
        raise DataError("streamed data cannot have weights, since their sizes are unknown; remove them")
    if made := [name for name in names if is_corpus(local_path(name, DataError))]:
        raise DataError(f"{made[0]} is a corpus, which is tokenized already; omit --streaming")
    request, first = make(list(names)), {}
    if resumed is not None and resumed["data"] == request.fingerprint(size):
        first = {"number": resumed["position"]["epoch"], "state": resumed["stream"]}
    blocks = Blocks(request, size, folder, is_first_of_node(), **first)
    assert blocks.first is not None
    kind = Documents if request.form is None else Groups
    documents = kind([Part(blocks.first.corpus, None)])
    documents.blocks = blocks
    return documents


def stream_folder(cache: Path, output: Path, name: str) -> Path:
    """Folder of this node's blocks of a run called `name`. Those that killed runs with this output left are
    removed.
    """
    of_output = cache / "streams" / hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:32]
    for left in of_output.glob("*") if of_output.is_dir() else ():
        if left.name != name:
            shutil.rmtree(left, ignore_errors=True)
    return of_output / name / f"node-{os.environ.get('GROUP_RANK', '0')}"  # the cache may be shared by nodes


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _nothing(count: int) -> None:
    """Ignore progress."""
