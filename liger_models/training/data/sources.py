"""What data can be named by, and the records in it, one after another.

    a.txt  a.md                      one document each
    a.jsonl                          a record a line; packed also a.jsonl.gz, and a.jsonl.zst (needs
                                     zstandard)
    a.parquet                        a record a row (needs pyarrow)
    folder  'folder/**/*.jsonl'      all files of these kinds in it, or that match, by name
    hf:OWNER/NAME[:CONFIG[:SPLIT]]   a data set of the Hugging Face hub, streamed (needs datasets); the split
                                     is train if none is named
    -                                JSON lines from standard input

Before each may stand its weight, as in `0.7=a.jsonl`. A file of such a name is meant by `./0.7=a.jsonl`.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import itertools
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError
from liger_models.convert.regular_file import open_regular
from liger_models.training.data.records import FORMS, LONG, Record, fields_of, parse_line, parse_row

Advance = Callable[[int], object]
Forms = tuple[str, ...]
STDIN = "-"
HUB = "hf:"
KINDS = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
WEIGHT = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)=(.+)", re.DOTALL)
ROWS = 1024  # of a table at once
LONG_TEXT = 1 << 25  # bytes of a file that is not read as a whole
BLOCK, OVERLAP = 1 << 20, 1 << 13  # characters
# A few bytes of a packed file can stand for gigabytes.
PACKED = 1 << 9  # bytes of a .zst file unpacked at once: at most 16 MiB, since 4 bytes give 128 KiB at most
LONGEST_LINE = 1 << 27  # bytes
BLANK_LINES = 1 << 16  # in a row
EXPANSION, FREE_EXPANSION = 1000, 1 << 28  # largest ratio, and the bytes below which none is too large
BATCH_BYTES = 1 << 26  # of the rows of a table that are held at once, on average


def split_weights(names: Iterable[str]) -> tuple[list[str], list[float] | None]:
    """Names without their weights, and the weights; None if there are none.

    Raises:
        DataError: some have a weight and others not, or one is 0.
    """
    found = [(match[2], float(match[1])) if (match := WEIGHT.fullmatch(n)) else (n, None) for n in names]
    weights = [weight for _, weight in found if weight is not None]
    if weights and len(weights) < len(found):
        bare = next(name for name, weight in found if weight is None)
        raise DataError(f"{bare} has no weight and other data has; give each one, as in 0.5={bare}")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise DataError(f"the weights of the data are {weights}; each must be more than 0")
    return [name for name, _ in found], weights or None


@dataclass(frozen=True)
class Source:
    """A file (`path`), or what else `name` says."""

    name: str
    path: Path | None = None

    def size(self) -> int:
        """Bytes, of a file."""
        return self.path.stat().st_size if self.path else 0

    def full_name(self) -> str:
        """The same from every working directory."""
        return str(self.path.absolute()) if self.path else self.name

    def identity(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        """What tells whether the source is as it was: size, time and digest of a file, a data set's commit.

        `known` is an earlier identity, which spares reading a file of the same size and time.
        """
        if self.path:
            status = self.path.stat()
            found = {"name": self.full_name(), "size": status.st_size, "time": status.st_mtime_ns}
            if known and all(known.get(key) == value for key, value in found.items()):
                return known
            with os.fdopen(open_regular(self.path), "rb") as file:
                return found | {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        if self.name.startswith(HUB):
            return {"name": self.name, "commit": _commit(self.name)}
        return {"name": self.name}

    def records(self, counts: Counter[str], advance: Advance, forms: Forms = FORMS) -> Iterator[Record]:
        """The records, in these forms; `advance` is told how many bytes of a file were read, or how many rows
        of others.

        Raises:
            DataError: the source, or a record of it, cannot be used; it names file and line.
        """
        if self.path is None:
            read = _read_hub if self.name.startswith(HUB) else _read_stdin
            yield from read(self.name, counts, advance, forms)
            return
        for record in _READERS[_kind(self.path)](self.path, counts, advance, forms):
            yield record._replace(folder=self.path.parent)


def find_sources(name: str, counts: Counter[str]) -> list[Source]:
    """The sources that one name means. Raises DataError where there are none."""
    if name == STDIN:
        return [Source(name)]
    if name.startswith(HUB):
        _hub_parts(name)
        return [Source(name)]
    path = local_path(name, DataError)
    if path.is_dir():
        return _in_folder(path, counts)
    if not path.exists() and glob.has_magic(name):
        matching = sorted(glob.glob(str(path), recursive=True))
        if files := [Path(found) for found in matching if os.path.isfile(found)]:
            return [_file(found) for found in files]
        raise DataError(f"no file matches {name}")
    return [_file(path)]


def _in_folder(folder: Path, counts: Counter[str]) -> list[Source]:
    # Hidden files are nobody's data: those of version control, of editors, of downloads.
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    known = [path for path in files if _kind(path)]
    if not known:
        raise DataError(f"the folder {folder} holds no file of a known kind: {', '.join(KINDS)}")
    if others := len(files) - len(known):
        counts["files of other kinds left aside"] += others
    return [_file(path) for path in known]


def _file(path: Path) -> Source:
    if not path.is_file():
        raise DataError(f"data file {path} {'is no file' if path.exists() else 'does not exist'}")
    if not _kind(path):
        raise DataError(f"data file {path} has suffix {path.suffix!r}; expected {', '.join(KINDS)}")
    return Source(str(path), path)


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.endswith(kind)), "")


# ------------------------------------------------------------------------------------------------- reading


def _read_text(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    if "text" not in forms:
        raise DataError(f"{path} is text; expected records with {', '.join(forms)}, as lines of .jsonl")
    if path.stat().st_size > LONG_TEXT:
        yield Record(str(path), LONG, _blocks(path, advance))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from error
    if text.strip():
        yield Record(str(path), "text", text)
    advance(path.stat().st_size)


def _blocks(path: Path, advance: Advance) -> Iterator[str]:
    """A long text in blocks, each of which begins with the last `OVERLAP` characters of the one before."""
    with path.open(encoding="utf-8-sig") as file:
        kept = ""
        try:
            while new := file.read(BLOCK):
                yield kept + new
                kept = (kept + new)[-OVERLAP:]
                advance(len(new))  # bytes, nearly
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 ({error}); convert it first") from error


def _read_lines(
    where: str,
    lines: BinaryIO | io.BufferedIOBase,
    counts: Counter[str],
    advance: Advance,
    forms: Forms,
    packed_size: int | None = None,
) -> Iterator[Record]:
    """Records of JSON lines; of a packed file, `packed_size` is its size."""
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
            yield parse_line(place, line, counts, forms)
        else:
            blank += 1
            counts["blank lines"] += 1
            if blank > BLANK_LINES:
                raise DataError(f"{place}: more than {BLANK_LINES:,} blank lines in a row; expected records")
        advance(len(line))


def _check_expansion(where: str, unpacked: int, packed: int | None) -> None:
    """Raises DataError where a packed file of `packed` bytes has become more than any real data would."""
    if packed is not None and unpacked > max(FREE_EXPANSION, EXPANSION * packed):
        raise DataError(
            f"{where}: a file of {packed:,} bytes has become {unpacked:,}, more than {EXPANSION:,} times as "
            "many; if that is meant, unpack it first"
        )


def _read_jsonl(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    with path.open("rb") as lines:
        yield from _read_lines(str(path), lines, counts, advance, forms)


def _read_gzip(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    done = 0
    with path.open("rb") as packed, gzip.open(packed) as lines:

        def told(_: int) -> None:
            nonlocal done
            advance(packed.tell() - done)
            done = packed.tell()

        try:
            yield from _read_lines(str(path), lines, counts, told, forms, path.stat().st_size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked ({error}); it is damaged, or no gzip file") from error


def _read_zstandard(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    with path.open("rb") as packed:
        pieces = _Pieces(_unpacked(path, packed, advance))
        with io.BufferedReader(pieces, 1 << 20) as lines:
            size = path.stat().st_size
            yield from _read_lines(str(path), lines, counts, lambda _: None, forms, size)


def _unpacked(path: Path, packed: BinaryIO, advance: Advance) -> Iterator[bytes]:
    """The content of a .zst file, whose frames follow one another. The library's own reader takes a file that
    was cut short for one that ends.
    """
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
                    f"{path} cannot be unpacked ({error}); it is damaged, or no Zstandard file"
                ) from error
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path} cannot be unpacked (it ends within a frame); it is damaged")


class _Pieces(io.RawIOBase):
    """A file whose content comes in pieces."""

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


def _read_stdin(name: str, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise DataError(
            "standard input can be read once, by one process; make a corpus of it first "
            "(liger-models tokenize MODEL --data - --output FOLDER) and train on that folder"
        )
    yield from _read_lines("standard input", sys.stdin.buffer, counts, lambda _: advance(1), forms)


def _read_parquet(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install 'liger_models[data]'") from error
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            columns, fields = file.schema_arrow.names, fields_of(forms)
            count = file.metadata.num_rows
            for column in columns:
                if column not in fields and count:
                    counts[f"fields {column!r} left aside"] += count
            chosen = [column for column in columns if column in fields]
            if not chosen and count:
                raise DataError(f"{path} has the columns {', '.join(columns)}; expected {', '.join(forms)}")
            texts, rows = _how_to_read(file)
        share, done = size / max(1, count), 0
        # A text that stands there once for thousands of rows is held once: tables are read in their own
        # encoding, and made into objects row by row.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            batches = (  # of each row group by itself: Arrow joins no dictionaries within lists
                batch
                for group in range(file.num_row_groups)
                for batch in file.iter_batches(rows, [group], columns=chosen)
            )
            values = (row for batch in batches for row in zip(*batch.columns, strict=True))
            for number, row in enumerate(values, 1):
                where = f"{path}, row {number}"
                record = {name: value.as_py() for name, value in zip(chosen, row, strict=True)}
                done += _size(record)
                _check_expansion(where, done, size)
                yield parse_row(where, record, counts, forms)
                advance(int(number * share) - int((number - 1) * share))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error})") from error


def _how_to_read(file: Any) -> tuple[list[str], int]:
    """The columns of a Parquet file to read as dictionaries of their values, and how many rows at once."""
    about, most, rows = file.metadata, 0.0, ROWS
    texts = {
        column.path
        for column in (about.schema.column(i) for i in range(len(about.schema)))
        if column.physical_type == "BYTE_ARRAY"
    }
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        most = max(most, group.total_byte_size / max(1, group.num_rows))
        for i in range(group.num_columns):
            column = group.column(i)
            # Arrow does not read these as dictionaries, and one that leaves out common beginnings expands.
            if column.path_in_schema in texts and any(name.startswith("DELTA") for name in column.encodings):
                texts.remove(column.path_in_schema)
                rows = ROWS // 64
    return sorted(texts), max(1, min(rows, int(BATCH_BYTES / max(1.0, most))))


def _size(value: Any) -> int:
    """Characters and bytes in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_size, value)) if isinstance(value, Iterable) else 8


_READERS: dict[str, Callable[[Path, Counter[str], Advance, Forms], Iterator[Record]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_gzip,
    ".jsonl.zst": _read_zstandard,
    ".parquet": _read_parquet,
}


def _hub_parts(name: str) -> tuple[str, str | None, str]:
    """Repository, configuration and split of `hf:OWNER/NAME[:CONFIG[:SPLIT]]`."""
    repository, config, split = [*name.removeprefix(HUB).split(":", 2), "", ""][:3]
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository):
        raise DataError(f"{name}: expected hf:OWNER/NAME, or hf:OWNER/NAME:CONFIG:SPLIT")
    return repository, config or None, split or "train"


def _commit(name: str) -> str:
    from huggingface_hub import HfApi

    repository = _hub_parts(name)[0]
    try:
        return str(HfApi().dataset_info(repository).sha)
    except Exception as error:  # of the network, of the hub, of offline mode
        raise DataError(
            f"{name}: the hub does not tell the data set's commit ({type(error).__name__}: {error}). "
            "A corpus made of it with `liger-models tokenize --output FOLDER` can be used without the hub"
        ) from error


def _read_hub(name: str, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(f"{name} needs datasets: pip install 'liger_models[data]'") from error
    repository, config, split = _hub_parts(name)
    try:
        data = load_dataset(repository, config, split=split, revision=_commit(name), streaming=True)
        rows = iter(_undecoded(data))
    except Exception as error:
        raise DataError(f"{name} cannot be opened ({type(error).__name__}: {error})") from error
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(
                f"{name}, row {number + 1}: cannot be read ({type(error).__name__}: {error})"
            ) from error
        number += 1
        where = f"{name}, row {number}"
        yield parse_row(where, _with_bytes(where, row, repository), counts, forms)._replace(folder=None)
        advance(1)


def _undecoded(data: Any) -> Any:
    """A data set whose images are bytes or paths: to decode them, datasets opens whatever file of this
    machine a row names.
    """
    if not getattr(data, "features", None):
        return data  # without features nothing is decoded
    data = data.decode(False)
    features = data.features.copy()
    return data.cast(type(features)(features)) if _decode_json(features) else data


def _decode_json(feature: Any) -> bool:
    """Decode the JSON in a feature, and in those that it holds. Whether there is any."""
    if type(feature).__name__ == "Json":
        feature.decode = True
        return True
    within = feature.values() if isinstance(feature, dict) else feature
    if hasattr(feature, "feature"):
        within = [feature.feature]
    return isinstance(within, Iterable) and sum(map(_decode_json, within)) > 0


def _with_bytes(where: str, value: Any, repository: str) -> Any:
    """A value of a row of a data set, with the bytes of images that are named as the data set's own files."""
    if isinstance(value, list):
        return [_with_bytes(where, one, repository) for one in value]
    if not isinstance(value, dict):
        return value
    path = value.get("path")
    if value.keys() != {"bytes", "path"} or value["bytes"] is not None or not isinstance(path, str):
        return {key: _with_bytes(where, one, repository) for key, one in value.items()}
    if not path.split("::")[-1].startswith(f"hf://datasets/{repository}@"):
        return value  # which is then refused as a file of this machine
    import fsspec

    try:
        with fsspec.open(path, "rb") as file:
            return {"bytes": file.read(), "path": None}
    except Exception as error:  # of the network, of the hub, of an archive
        raise DataError(f"{where}: {path} cannot be read ({type(error).__name__}: {error})") from error
