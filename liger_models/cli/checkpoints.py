"""Shared helpers of the commands: checkpoint lookup and human-readable numbers."""

from collections.abc import Sequence
from pathlib import Path


def find_checkpoint(name: str) -> Path:
    """Folder of a checkpoint, given its path, a training run's folder (its latest checkpoint), or a hub id.

    Raises:
        CheckpointError, HubError: the checkpoint does not exist or cannot be downloaded.
    """
    from liger_models.convert.checkpoints.hub import resolve
    from liger_models.training.checkpoints.state import newest_checkpoint

    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        run = [path for path in (folder / "final", newest_checkpoint(folder)) if path is not None]
        written = [path for path in run if (path / "config.json").is_file()]
        if written:  # `final` is older if a resumed run was stopped
            return max(written, key=lambda path: (path / "config.json").stat().st_mtime)
    return resolve(name)


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
