"""Reader of .json files: an array of records, or a record per line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from liger_models.convert.errors import DataError
from liger_models.training.data.reading import lines
from liger_models.training.data.reading.lines import Advance, read_jsonl
from liger_models.training.data.reading.records import Record, parse_line
from liger_models.training.data.reading.schema import Schema

BLOCK = 1 << 20  # bytes read at once
_IN_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUTSIDE = re.compile(rb'["\[\]{},]')
_BLANK = b" \t\r\n"


def read_json(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    """Read the records one at a time, so that memory holds one of them and a block.

    Raises:
        DataError: the file is neither an array of objects nor JSON lines, with the record's number and line.
    """
    with path.open("rb") as file:
        begin = 3 if file.read(3) == b"\xef\xbb\xbf" else 0  # a byte order mark
        file.seek(begin)
        while (first := file.read(BLOCK)) and not first.strip(_BLANK):
            pass
        file.seek(begin)
        if not first.lstrip(_BLANK).startswith(b"["):
            yield from read_jsonl(path, counts, advance, schema)
            return
        for number, (line, text) in enumerate(_elements(path, file, advance), 1):
            yield parse_line(f"{path}, record {number} (line {line})", text, counts, schema)


def _elements(path: Path, file: BinaryIO, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """Yield (line, text) of each element of the array in a file."""
    found = bytearray()  # of the current element, scanned up to `place`
    line, place, depth, in_text, number = 1, 0, 0, False, 0
    while block := file.read(BLOCK):
        advance(len(block))
        found += block
        while place < len(found):
            if in_text:
                place = _IN_TEXT.match(found, place).end()  # type: ignore[union-attr]
                if found[place : place + 1] == b'"':
                    in_text, place = False, place + 1
                    continue
                break  # the text, or an escape in it, continues in the next block
            match = _OUTSIDE.search(found, place)
            if match is None:
                place = len(found)
                break
            mark, place = match[0], match.end()
            in_text = mark == b'"'
            depth += (mark in b"[{") - (mark in b"]}") if not in_text else 0
            if depth == 1 and mark == b"[" and number == 0 and not found[: place - 1].strip(_BLANK):
                line += found.count(b"\n", 0, place)
                del found[:place]
                place, number = 0, 1
                continue
            if (depth == 1 and mark == b",") or depth == 0:
                element = bytes(found[: place - 1])
                blank = len(element) - len(element.lstrip(_BLANK))
                text = element.strip(_BLANK)
                if text:
                    yield line + element.count(b"\n", 0, blank), text
                    number += 1
                elif depth or number > 1:
                    last = line + element.count(b"\n")
                    raise DataError(f"{path}, line {last}: a comma without a record")
                line += found.count(b"\n", 0, place)
                del found[:place]
                place = 0
                if depth == 0:
                    if (bytes(found) + file.read(BLOCK)).strip(_BLANK):
                        raise DataError(f"{path}, line {line}: there is text after the end of the array")
                    return
        if len(found) > lines.LONGEST_LINE:
            raise DataError(
                f"{path}, record {number} (line {line}): longer than {lines.LONGEST_LINE:,} bytes; "
                "split it, or give a long text as a .txt file"
            )
    raise DataError(f"{path} ends within its array, in record {number} (line {line}); it is damaged")
