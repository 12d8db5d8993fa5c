"""Reader of .csv and .tsv files with a header (RFC 4180): each row is a record of texts.

The standard library's reader limits the size of fields by a setting of the whole process, so this is our own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from liger_models.convert.errors import DataError
from liger_models.training.data.reading import lines
from liger_models.training.data.reading.lines import Advance
from liger_models.training.data.reading.records import Record, parse_row
from liger_models.training.data.reading.schema import IMAGES, OPTIONS, TOOLS, Schema
from liger_models.training.data.reading.sharegpt import CONVERSATIONS

_QUOTED = re.compile(r'[^"]*(?:""[^"]*)*')
_LISTS = {"messages", CONVERSATIONS, IMAGES, TOOLS, OPTIONS}  # fields that hold JSON
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def read_csv(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    """Read a record per row; an empty field is an empty text.

    Raises:
        DataError: a row that does not fit the header, an unclosed quote, or an unusable record, with its row
            and line.
    """
    separator = "\t" if path.suffix == ".tsv" else ","
    renamed = {column: field for field, column in schema.columns}
    with path.open("rb") as file:
        rows = _rows(path, file, separator, advance)
        _, header = next(rows, (1, []))
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise DataError(f"{path}, line 1: the header has the column {twice[0]!r} twice")
        if len(header) == 1 and separator == "," and header[0].count(";"):
            raise DataError(
                f"{path}, line 1: the header is one column, {header[0]!r}; fields are separated by commas in "
                ".csv files, and by tabs in .tsv files"
            )
        for number, (line, values) in enumerate(rows, 1):
            where = f"{path}, row {number} (line {line})"
            if len(values) != len(header):
                raise DataError(f"{where}: {len(values)} fields, and the header has {len(header)} columns")
            named = zip(header, values, strict=True)
            row = {name: _typed(renamed.get(name, name), value) for name, value in named if name or value}
            yield parse_row(where, row, counts, schema)


def _typed(field: str, value: str) -> Any:
    """Parse the JSON or the truth value in a field that is not text; leave all else to later checks."""
    if field == "label":
        return _TRUTH.get(value.strip().lower(), value)
    if field in _LISTS:
        try:
            return json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return value
    return value


def _rows(path: Path, file: BinaryIO, separator: str, advance: Advance) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields) of each row that is not blank."""
    plain = re.compile(f"[^{separator}\r\n]*")
    number = 0

    def next_line() -> str:
        nonlocal number
        number += 1
        text = file.readline(lines.LONGEST_LINE + 1)
        advance(len(text))
        if len(text) > lines.LONGEST_LINE:
            raise DataError(f"{path}, line {number}: longer than {lines.LONGEST_LINE:,} bytes")
        try:
            return text.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8 at byte {error.start} of the line") from error

    while text := next_line():
        if not text.strip("\r\n"):
            continue
        first, place, values = number, 0, []
        while True:
            if text[place : place + 1] == '"':
                parts, place, size = [], place + 1, 0
                while (end := _QUOTED.match(text, place).end()) == len(text):  # type: ignore[union-attr]
                    parts.append(text[place:])
                    size += len(parts[-1])
                    text, place = next_line(), 0
                    if not text or size > lines.LONGEST_LINE:
                        raise DataError(f"{path}, line {first}: a quote in this row is not closed")
                values.append("".join([*parts, text[place:end]]).replace('""', '"'))
                place = end + 1
            else:
                end = plain.match(text, place).end()  # type: ignore[union-attr]
                values.append(text[place:end])
                place = end
            if text[place : place + 1] != separator:
                break
            place += 1
        if text[place:].strip("\r\n"):
            raise DataError(f"{path}, line {number}: found {text[place : place + 20]!r} after a quoted field")
        yield first, values
