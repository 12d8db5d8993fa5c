"""Readers of text files and JSON lines, plain, compressed or from standard input."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from liger_models.convert.errors import DataError
from liger_models.training.data.reading.records import LONG, Record, parse_line
from liger_models.training.data.reading.schema import Schema

Advance = Callable[[int], object]
LONG_TEXT = 1 << 25  # bytes; longer files are read in blocks
BLOCK, OVERLAP = 1 << 20, 1 << 13  # characters
# A few bytes of a compressed file can expand to gigabytes.
PACKED = 1 << 9  # bytes of a .zst file unpacked at once: at most 16 MiB, since 4 bytes give 128 KiB at most
LONGEST_LINE = 1 << 27  # bytes
BLANK_LINES = 1 << 16  # in a row
EXPANSION, FREE_EXPANSION = 1000, 1 << 28  # largest ratio, and the size below which any is accepted


def read_text(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    if "text" not in schema.forms:
        raise DataError(
            f"{path} is text; expected records with {', '.join(schema.forms)}, as lines of .jsonl"
        )
    if path.stat().st_size > LONG_TEXT:
        yield Record(str(path), LONG, _blocks(path, advance))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from error
    if text.strip():
        yield Record(str(path), "text", text)
    advance(path.stat().st_size)


def _blocks(path: Path, advance: Advance) -> Iterator[str]:
    """Yield a long text in blocks; each starts with the last `OVERLAP` characters of the previous one."""
    with path.open(encoding="utf-8-sig") as file:
        kept = ""
        try:
            while new := file.read(BLOCK):
                yield kept + new
                kept = (kept + new)[-OVERLAP:]
                advance(len(new))  # approximately bytes
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 ({error}); convert it first") from error


def _read_lines(
    where: str,
    lines: BinaryIO | io.BufferedIOBase,
    counts: Counter[str],
    advance: Advance,
    schema: Schema,
    packed_size: int | None = None,
) -> Iterator[Record]:
    """Read records from JSON lines; `packed_size` is the compressed file's size."""
    blank = done = 0
    for number in itertools.count(1):
        line = lines.readline(LONGEST_LINE + 1)
        if not line:
            return
        place = f"{where}, line {number}"
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{place}: longer than {LONGEST_LINE:,} bytes; expected one record per line. Split it, or "
                "give a long text as a .txt file"
            )
        done += len(line)
        _check_expansion(place, done, packed_size)
        if line.strip():
            blank = 0
            yield parse_line(place, line, counts, schema)
        else:
            blank += 1
            counts["blank lines"] += 1
            if blank > BLANK_LINES:
                raise DataError(f"{place}: more than {BLANK_LINES:,} blank lines in a row; expected records")
        advance(len(line))


def _check_expansion(where: str, unpacked: int, packed: int | None) -> None:
    """Raise DataError if `packed` bytes expand beyond any plausible ratio."""
    if packed is not None and unpacked > max(FREE_EXPANSION, EXPANSION * packed):
        raise DataError(
            f"{where}: a file of {packed:,} bytes has become {unpacked:,}, more than {EXPANSION:,} times as "
            "many; if that is meant, unpack it first"
        )


def read_jsonl(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    with path.open("rb") as lines:
        yield from _read_lines(str(path), lines, counts, advance, schema)


def read_gzip(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    done = 0
    with path.open("rb") as packed, gzip.open(packed) as lines:

        def advance_packed(_: int) -> None:
            nonlocal done
            advance(packed.tell() - done)
            done = packed.tell()

        try:
            yield from _read_lines(str(path), lines, counts, advance_packed, schema, path.stat().st_size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked ({error}); it is damaged or not gzip") from error


def read_zstandard(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    with path.open("rb") as packed:
        pieces = _Pieces(_unpacked(path, packed, advance))
        with io.BufferedReader(pieces, 1 << 20) as lines:
            size = path.stat().st_size
            yield from _read_lines(str(path), lines, counts, lambda _: None, schema, size)


def _unpacked(path: Path, packed: BinaryIO, advance: Advance) -> Iterator[bytes]:
    """Decompress the frames of a .zst file. The library's own reader does not detect truncated files."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{path} needs zstandard: pip install 'liger_models[data]'") from error
    frame = None
    while block := packed.read(PACKED):
        advance(len(block))
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise DataError(
                    f"{path} cannot be unpacked ({error}); it is damaged or not Zstandard"
                ) from error
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path} cannot be unpacked (it ends within a frame); it is damaged")


class _Pieces(io.RawIOBase):
    """File object over an iterator of byte strings."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces, self.left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            piece = next(self.pieces, None)
            if piece is None:
                return 0
            self.left = memoryview(piece)
        count = min(len(buffer), len(self.left))
        buffer[:count], self.left = self.left[:count], self.left[count:]
        return count


def read_stdin(name: str, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DataError(
            "standard input can be read once, by one process; make a corpus of it first "
            "(liger-models tokenize MODEL --data - --output FOLDER) and train on that folder"
        )
    yield from _read_lines("standard input", sys.stdin.buffer, counts, lambda _: advance(1), schema)
