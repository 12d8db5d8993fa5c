"""What the commands share: finding the checkpoint that a name stands for, and numbers for people."""

from collections.abc import Sequence
from pathlib import Path


def find_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: itself, the latest of a training run's folder, or the hub's.

    Raises:
        CheckpointError, HubError: there is no such checkpoint, or it cannot be had.
    """
    from liger_models.convert.checkpoints.hub import resolve
    from liger_models.training.checkpoints.state import newest_checkpoint

    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        run = [path for path in (folder / "final", newest_checkpoint(folder)) if path is not None]
        written = [path for path in run if (path / "config.json").is_file()]
        if written:  # after a run was resumed and stopped, `final` is the older one
            return max(written, key=lambda path: (path / "config.json").stat().st_mtime)
    return resolve(name)


def bytes_text(count: float) -> str:
    """1234567 -> '1.2 MB' (powers of ten, as disks and safetensors files are counted)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Indented, with left-aligned columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
