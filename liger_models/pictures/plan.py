"""The memory of a planned step: `liger-models plan --picture FILE.svg`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_models.convert.errors import ConfigError
from liger_models.pictures.svg import bars


def write_plan(report: dict[str, Any], path: Path) -> None:
    """Write the parts of the peak, as planned and with all layers at one level, next to what the GPU has.

    Args:
        report: the output of `liger-models plan --json`.
        path: the file, with the ending .svg.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"--picture is {str(path)!r}; expected a file name that ends in .svg")
    rows = {"this plan": report["parts"]}
    rows |= {level: found["parts"] for level, found in report["by_level"].items()}
    in_gib = {row: {name: count / 2**30 for name, count in parts.items()} for row, parts in rows.items()}
    gpus = f"each of {report['gpus']} {report['gpu']}" if report["gpus"] > 1 else report["gpu"]
    title = f"{report['model']}, {report['batch_size']} x {report['seq_len']:,} tokens on {gpus}: peak memory"
    try:
        path.write_text(bars(title, in_gib, "GiB", ("available", report["budget"] / 2**30)))
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error.strerror or error}") from error
