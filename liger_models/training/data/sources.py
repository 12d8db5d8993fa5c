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
PACKED = 1 << 16  # bytes of a .zst file at once, which may become a thousand times as many


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
            with self.path.open("rb") as file:
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
    where: str, lines: Iterable[bytes], counts: Counter[str], advance: Advance, forms: Forms
) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield parse_line(f"{where}, line {number}", line, counts, forms)
        else:
            counts["blank lines"] += 1
        advance(len(line))


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
            yield from _read_lines(str(path), lines, counts, told, forms)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked ({error}); it is damaged, or no gzip file") from error


def _read_zstandard(path: Path, counts: Counter[str], advance: Advance, forms: Forms) -> Iterator[Record]:
    with path.open("rb") as packed:
        lines = _split_lines(_unpacked(path, packed, advance))
        yield from _read_lines(str(path), lines, counts, lambda _: None, forms)


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


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


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
    try:
        with parquet.ParquetFile(path) as file:
            columns, fields = file.schema_arrow.names, fields_of(forms)
            for column in columns:
                if column not in fields and file.metadata.num_rows:
                    counts[f"fields {column!r} left aside"] += file.metadata.num_rows
            chosen = [column for column in columns if column in fields]
            if not chosen and file.metadata.num_rows:
                raise DataError(f"{path} has the columns {', '.join(columns)}; expected {', '.join(forms)}")
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            rows = (row for batch in file.iter_batches(ROWS, columns=chosen) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield parse_row(f"{path}, row {number}", row, counts, forms)
                advance(int(number * share) - int((number - 1) * share))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error})") from error


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
        rows = iter(load_dataset(repository, config, split=split, revision=_commit(name), streaming=True))
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
        yield parse_row(f"{name}, row {number}", row, counts, forms)
        advance(1)
