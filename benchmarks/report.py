"""What all reports share: the machine, Markdown tables, CSV files."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


def machine(device: torch.device, *packages: str) -> str:
    """One line: the device, Python, and the versions of torch, Triton and the named packages."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    versions = [f"torch {torch.__version__}"]
    for package in ("triton", *packages):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return ", ".join([hardware, f"Python {platform.python_version()}", *versions])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def publish(out: str, name: str, markdown: str, rows: Sequence[dict[str, object]], show: bool = True) -> None:
    """Write the Markdown with the rows' CSV into the folder `out`, and print it."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown + "\n")
    write_csv(folder / f"{name}.csv", rows)
    if show:
        print(markdown, flush=True)
