"""Shared parts of all reports: the machine, Markdown tables, CSV files."""

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


def renew(page: Path, marks: tuple[str, str], title: str, text: str) -> None:
    """Replace the text between the marks of a page; adds a section with this title if there are none."""
    begin, end = marks
    old = page.read_text(encoding="utf-8") if page.is_file() else "# Performance\n"
    if begin not in old:
        old += f"\n## {title}\n\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def bars(
    path: Path, heading: str, values: Sequence[tuple[str, float]], form: str, line: float | None = None
) -> str:
    """Plot named values as bars, with those from `line` on in red. Returns a status message."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    if not values:
        return "no plot: nothing was timed"
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(values)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    axes = figure.add_subplot()
    places, lengths = range(len(values)), [value for _, value in values]
    axes.barh(places, lengths, color=["#d1495b" if value >= (line or 0) else "#8a8a8a" for value in lengths])
    for place, value in zip(places, lengths, strict=True):
        axes.text(value, place, f" {value:{form}}", va="center", fontweight="bold")
    if line is not None:
        axes.axvline(line, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(places, [name for name, _ in values], fontsize=9)
    axes.set_xlim(0, 1.12 * max(lengths))
    axes.invert_yaxis()
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left")
    figure.savefig(path)
    return f"picture: {path}"
