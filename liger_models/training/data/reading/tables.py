"""Readers of tables: Parquet files and Hugging Face hub datasets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from liger_models.convert.errors import DataError
from liger_models.training.data.reading.lines import Advance, _check_expansion
from liger_models.training.data.reading.records import Record, parse_row
from liger_models.training.data.reading.schema import PROMPT, Schema

HUB = "hf:"
ROWS = 1024  # read at once
BATCH_BYTES = 1 << 26  # of the rows read at once, on average


def read_parquet(path: Path, counts: Counter[str], advance: Advance, schema: Schema) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install 'liger_models[data]'") from error
    size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            columns, fields = file.schema_arrow.names, schema.fields()
            count = file.metadata.num_rows
            for column in columns:
                if column not in fields and count and PROMPT not in schema.forms:
                    counts[f"fields {column!r} left aside"] += count
            chosen = [column for column in columns if column in fields or PROMPT in schema.forms]
            if not chosen and count:
                raise DataError(
                    f"{path} has the columns {', '.join(columns)}; expected {schema.expected(columns)}"
                )
            texts, rows = _how_to_read(file)
        share, done = size / max(1, count), 0
        # Dictionary-encoded columns stay encoded, so that a text repeated in thousands of rows is held once;
        # rows are decoded one by one.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            batches = (  # per row group: Arrow cannot merge dictionaries within lists
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
                yield parse_row(where, record, counts, schema)
                advance(int(number * share) - int((number - 1) * share))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error})") from error


def _how_to_read(file: Any) -> tuple[list[str], int]:
    """Return the Parquet columns to read dictionary-encoded, and the rows per batch."""
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
            # Arrow cannot read these dictionary-encoded, and prefix compression expands when decoded.
            if column.path_in_schema in texts and any(name.startswith("DELTA") for name in column.encodings):
                texts.remove(column.path_in_schema)
                rows = ROWS // 64
    return sorted(texts), max(1, min(rows, int(BATCH_BYTES / max(1.0, most))))


def _size(value: Any) -> int:
    """Count the characters and bytes in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_size, value)) if isinstance(value, Iterable) else 8


def hub_parts(name: str) -> tuple[str, str | None, str]:
    """Parse repository, configuration and split from `hf:OWNER/NAME[:CONFIG[:SPLIT]]`."""
    repository, config, split = [*name.removeprefix(HUB).split(":", 2), "", ""][:3]
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", repository):
        raise DataError(f"{name}: expected hf:OWNER/NAME, or hf:OWNER/NAME:CONFIG:SPLIT")
    return repository, config or None, split or "train"


def commit_of(name: str) -> str:
    from huggingface_hub import HfApi

    repository = hub_parts(name)[0]
    try:
        return str(HfApi().dataset_info(repository).sha)
    except Exception as error:  # network, hub or offline mode
        raise DataError(
            f"{name}: the hub does not return the data set's commit ({type(error).__name__}: {error}). A "
            "corpus made of it with `liger-models tokenize --output FOLDER` can be used without the hub"
        ) from error


class HubRows:
    """Iterator over the rows of a hub data set.

    Args:
        name: `hf:OWNER/NAME[:CONFIG[:SPLIT]]`.
        commit: its commit; default: the newest.
        state: where to begin, an earlier `state()`.

    Raises:
        DataError: datasets is not installed, or the data set cannot be opened or read.
    """

    def __init__(self, name: str, commit: str | None = None, state: dict[str, Any] | None = None) -> None:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise DataError(f"{name} needs datasets: pip install 'liger_models[data]'") from error
        self.name, self.number, self.part = name, 0, 0
        repository, config, split = hub_parts(name)
        try:
            opened = _opened(load_dataset, repository, config, split, commit or commit_of(name))
            self.parts = [_undecoded(data) for data in opened]
            if state is not None:
                self.number, self.part = state["rows"], state["part"]
                if state["data"] is not None:
                    self.parts[self.part].load_state_dict(state["data"])
        except Exception as error:
            raise DataError(f"{name} cannot be opened ({type(error).__name__}: {error})") from error
        self._rows = self._iterate()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:
            raise DataError(
                f"{self.name}, row {self.number + 1}: cannot be read ({type(error).__name__}: {error})"
            ) from error
        self.number += 1
        return row

    def state(self) -> dict[str, Any]:
        """The place after the last row, for JSON: the part of the split, the rows before, and datasets' own
        state.
        """
        return {"part": self.part, "rows": self.number, "data": self.parts[self.part].state_dict()}

    def _iterate(self) -> Iterator[Any]:
        for self.part in range(self.part, len(self.parts)):  # noqa: B020 (goes on from the state's part)
            yield from self.parts[self.part]


def read_hub(
    name: str, counts: Counter[str], advance: Advance, schema: Schema, rows: HubRows | None = None
) -> Iterator[Record]:
    rows = rows or HubRows(name)
    repository = hub_parts(name)[0]
    for row in rows:
        where = f"{name}, row {rows.number}"
        yield parse_row(where, _with_bytes(where, row, repository), counts, schema)._replace(folder=None)
        advance(1)


def _opened(load_dataset: Any, repository: str, config: str | None, split: str, commit: str) -> Iterator[Any]:
    """Open the parts of a split, which may be slices and sums as datasets names them: train[:90%]+test."""

    def opened(name: str) -> Any:
        return load_dataset(repository, config, split=name, revision=commit, streaming=True)

    if not re.search(r"[\[+]", split):
        yield opened(split)
        return
    from datasets import ReadInstruction, load_dataset_builder

    splits = load_dataset_builder(repository, config, revision=commit).info.splits
    if not splits:
        raise ValueError("the data set does not say how many rows its splits have, which slices need")
    sizes = {found: about.num_examples for found, about in splits.items()}
    for part in ReadInstruction.from_spec(split).to_absolute(sizes):
        first, last = part.from_ or 0, sizes[part.splitname] if part.to is None else part.to
        yield opened(part.splitname).skip(first).take(last - first)


def _undecoded(data: Any) -> Any:
    """Turn off image decoding in a dataset, which would open any local file that a row names."""
    if not getattr(data, "features", None):
        return data  # no features, no decoding
    data = data.decode(False)
    features = data.features.copy()
    return data.cast(type(features)(features)) if _decode_json(features) else data


def _decode_json(feature: Any) -> bool:
    """Enable JSON decoding in a feature and its nested features; return whether there is any."""
    if type(feature).__name__ == "Json":
        feature.decode = True
        return True
    within = feature.values() if isinstance(feature, dict) else feature
    if hasattr(feature, "feature"):
        within = [feature.feature]
    return isinstance(within, Iterable) and sum(map(_decode_json, within)) > 0


def _with_bytes(where: str, value: Any, repository: str) -> Any:
    """Replace images named as files of the dataset by their bytes."""
    if isinstance(value, list):
        return [_with_bytes(where, one, repository) for one in value]
    if not isinstance(value, dict):
        return value
    path = value.get("path")
    if value.keys() != {"bytes", "path"} or value["bytes"] is not None or not isinstance(path, str):
        return {key: _with_bytes(where, one, repository) for key, one in value.items()}
    if not path.split("::")[-1].startswith(f"hf://datasets/{repository}@"):
        return value  # refused later as a local file
    import fsspec

    try:
        with fsspec.open(path, "rb") as file:
            return {"bytes": file.read(), "path": None}
    except Exception as error:  # network, hub or archive
        raise DataError(f"{where}: {path} cannot be read ({type(error).__name__}: {error})") from error
