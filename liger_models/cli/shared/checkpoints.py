"""Shared helpers of the commands: checkpoint lookup and human-readable numbers."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path


def find_checkpoint(name: str) -> Path:
    """Folder of a model or an adapter, given its path, a training run's folder (its latest checkpoint), or a
    hub id.

    Raises:
        CheckpointError, HubError: the checkpoint does not exist or cannot be downloaded.
    """
    from liger_models.convert.checkpoints.hub import resolve

    return resolve(name, adapter=True)


def find_tokenizer(name: str) -> Path:
    """Folder of a tokenizer's files, given the folder, a training run's folder, or a hub id.

    Raises:
        CheckpointError, HubError: it does not exist or cannot be downloaded.
    """
    from liger_models.convert.checkpoints.hub import latest_in_run, local_path, resolve

    folder = local_path(latest_in_run(name))
    return folder if (folder / "tokenizer.json").is_file() else resolve(name)


def add_base(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--base", metavar="MODEL", help="base model of an adapter (default: the one that it names)"
    )


def bytes_text(count: float) -> str:
    """1234567 -> '1.2 MB' (powers of ten, as for disks and safetensors files)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print an indented table with left-aligned columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
