"""Data source names, and iteration over their records.

    a.txt  a.md                      one document each
    a.jsonl                          a record per line; also a.jsonl.gz, and a.jsonl.zst (needs zstandard)
    a.json                           an array of records, or a record per line
    a.csv  a.tsv                     a record per row, after a header
    a.parquet                        a record per row (needs pyarrow)
    folder  'folder/**/*.jsonl'      all such files in the folder, or all matches, sorted by name
    hf:OWNER/NAME[:CONFIG[:SPLIT]]   a Hugging Face hub dataset, streamed (needs datasets); split: train
    -                                JSON lines from standard input

A weight may precede each name, as in `0.7=a.jsonl`. Write `./0.7=a.jsonl` for a file with such a name.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import local_path
from liger_models.convert.errors import DataError
from liger_models.convert.regular_file import open_regular
from liger_models.training.data.reading import tables
from liger_models.training.data.reading.arrays import read_json
from liger_models.training.data.reading.lines import (
    Advance,
    read_gzip,
    read_jsonl,
    read_stdin,
    read_text,
    read_zstandard,
)
from liger_models.training.data.reading.records import ANY, Record
from liger_models.training.data.reading.schema import Schema
from liger_models.training.data.reading.spreadsheets import read_csv
from liger_models.training.data.reading.tables import HUB, hub_parts, read_hub, read_parquet

STDIN = "-"
KINDS = (".txt", ".md", ".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".csv", ".tsv", ".parquet")
# Files of other purposes in the folders of data sets.
ASIDE = {"dataset_info.json", "dataset_infos.json", "state.json"}
_HUB_NAME = r"\w[\w.-]*/\w[\w-]*"
WEIGHT = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)=(.+)", re.DOTALL)


def split_weights(names: Iterable[str]) -> tuple[list[str], list[float] | None]:
    """Split names and weights; the weights are None if there are none.

    Raises:
        DataError: only some names have a weight, or a weight is 0.
    """
    found = [(match[2], float(match[1])) if (match := WEIGHT.fullmatch(n)) else (n, None) for n in names]
    weights = [weight for _, weight in found if weight is not None]
    if weights and len(weights) < len(found):
        bare = next(name for name, weight in found if weight is None)
        raise DataError(f"{bare} has no weight and other data has; give each one, as in 0.5={bare}")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise DataError(f"the weights of the data are {weights}; each must be more than 0")
    return [name for name, _ in found], weights or None


def with_split(names: Iterable[str], split: str | None) -> list[str]:
    """Add a split to the names of hub data sets without one.

    Raises:
        DataError: no name could take it.
    """
    names = list(names)
    if split is None:
        return names
    bare = [name.startswith(HUB) and name.count(":") < 3 for name in names]
    if not any(bare):
        raise DataError(
            f"split is {split!r}, but no data set of the hub without a split is named; expected data such as "
            "hf:OWNER/NAME"
        )
    padded = (name + ":" * (3 - name.count(":")) for name in names)
    return [p + split if is_bare else n for n, p, is_bare in zip(names, padded, bare, strict=True)]


@dataclass(frozen=True)
class Source:
    """Data source: a file (`path`), or a hub dataset or standard input by `name`."""

    name: str
    path: Path | None = None

    def size(self) -> int:
        """Size of a file in bytes."""
        return self.path.stat().st_size if self.path else 0

    def full_name(self) -> str:
        """Name that does not depend on the working directory."""
        return str(self.path.absolute()) if self.path else self.name

    def identity(self, known: dict[str, Any] | None = None) -> dict[str, Any]:
        """Identity of the content: size, time and digest of a file, or a dataset's commit.

        `known` is an earlier identity; if size and time are equal, the file is not read again.
        """
        if self.path:
            status = self.path.stat()
            found = {"name": self.full_name(), "size": status.st_size, "time": status.st_mtime_ns}
            if known and all(known.get(key) == value for key, value in found.items()):
                return known
            with os.fdopen(open_regular(self.path), "rb") as file:
                return found | {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        if self.name.startswith(HUB):
            return {"name": self.name, "commit": tables.commit_of(self.name)}
        return {"name": self.name}

    def records(self, counts: Counter[str], advance: Advance, schema: Schema = ANY) -> Iterator[Record]:
        """Yield the records, in the forms of a schema. `advance` receives the bytes read of a file, or
        the rows read of other sources.

        Raises:
            DataError: the source or a record is unusable, with file and line.
        """
        if self.path is None:
            read = read_hub if self.name.startswith(HUB) else read_stdin
            yield from read(self.name, counts, advance, schema)
            return
        for record in _READERS[_kind(self.path)](self.path, counts, advance, schema):
            yield record._replace(folder=self.path.parent)


def find_sources(name: str, counts: Counter[str]) -> list[Source]:
    """Return the sources that a name matches. Raises DataError if there are none."""
    if name == STDIN:
        return [Source(name)]
    if name.startswith(HUB):
        hub_parts(name)
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
    # Skip hidden files: version control, editors, downloads.
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    known = [path for path in files if _kind(path) and path.name not in ASIDE]
    if not known:
        raise DataError(f"the folder {folder} holds no file of a known kind: {', '.join(KINDS)}")
    if others := len(files) - len(known):
        counts["files of other kinds left aside"] += others
    return [_file(path) for path in known]


def _file(path: Path) -> Source:
    if not path.is_file():
        if path.exists():
            raise DataError(f"data file {path} is not a file")
        name = str(path)
        of_hub = f"; for the data set of the hub write {HUB}{name}" if re.fullmatch(_HUB_NAME, name) else ""
        raise DataError(f"data file {path} does not exist{of_hub}")
    if not _kind(path):
        raise DataError(
            f"data file {path} has suffix {path.suffix!r}; expected {', '.join(KINDS)} (for other "
            'texts, such as source code, write a .jsonl file with {"text": ...} on each line)'
        )
    return Source(str(path), path)


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.endswith(kind)), "")


_READERS: dict[str, Callable[[Path, Counter[str], Advance, Schema], Iterator[Record]]] = {
    ".txt": read_text,
    ".md": read_text,
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_gzip,
    ".jsonl.zst": read_zstandard,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}
