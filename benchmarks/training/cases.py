"""The cases of a training step on one GPU that docs/performance.md tells, as a table and a picture.

A case is ours first and then its peers, on the same model and data; a ratio is ours over a peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import markdown_table
from benchmarks.training.step import Job, Result

Configuration = tuple[str, str, int, str]  # provider, activation memory, batch, data
Rows = Sequence[tuple[Job, Result]]

HEADER = ("case", "provider", "activation memory", "tokens/s", "ours is", "peak GiB", "of its memory", "ms")
BEGIN, END = "<!-- training step: python -m benchmarks train --cases -->", "<!-- end of the training step -->"
PICTURE = "performance.png"
LARGE, SMALL = "llama-3-8b", "llama-3.2-1b"

CASES: Mapping[str, tuple[str, tuple[Configuration, ...]]] = {
    "8B, 8 x 4096, as much kept as fits": (
        LARGE,
        (
            ("ours", "auto", 8, "full"),
            ("transformers+liger", "checkpoint", 8, "full"),
            ("transformers", "checkpoint", 8, "full"),
        ),
    ),
    "8B, 8 x 4096, checkpointed": (
        LARGE,
        (
            ("ours", "checkpoint", 8, "full"),
            ("transformers+liger", "checkpoint", 8, "full"),
            ("transformers", "checkpoint", 8, "full"),
        ),
    ),
    "8B, 4 x 4096, nothing recomputed": (
        LARGE,
        (("ours", "lean", 4, "full"), ("transformers+liger", "none", 4, "full")),
    ),
    "8B, 4 x 4096, stochastic weights": (
        LARGE,
        (("ours+stochastic", "lean", 4, "full"), ("ours+plain", "lean", 4, "full")),
    ),
    "8B, 4 x 4096, compensated weights": (
        LARGE,
        (("ours+compensated", "lean", 4, "full"), ("ours+plain", "lean", 4, "full")),
    ),
    "8B, 4 documents, 75% masked": (
        LARGE,
        (
            ("ours", "lean", 4, "packed"),
            ("transformers+liger", "none", 4, "padded"),
            ("transformers+liger", "none", 4, "packed"),
        ),
    ),
    "1B, 16 documents, 75% masked": (
        SMALL,
        (
            ("ours", "lean", 16, "packed"),
            ("transformers+liger", "none", 16, "padded"),
            ("transformers+liger", "none", 16, "packed"),
            ("transformers+liger+flex_attention", "none", 16, "packed"),
        ),
    ),
}


def configurations(model: str) -> tuple[Configuration, ...]:
    """All of a model's cases, each once."""
    return tuple(dict.fromkeys(c for of, cs in CASES.values() if of == model for c in cs))


def table(rows: Rows) -> str:
    """What has been measured so far, as Markdown."""
    lines = []
    for case, ours, peers in _measured(rows):
        lines.append([case, *_line(ours)])
        lines += [["", *_line(peer, ours)] for peer in peers]
    return markdown_table(HEADER, lines)


def draw(rows: Rows, title: str, path: Path) -> str:
    """Write the picture: of each case and peer, how much faster ours is. Returns what was done."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed"
    bars = [
        (f"{case}: {peer[0].provider} {peer[0].memory} {peer[0].data}", _speed(ours) / _speed(peer))
        for case, ours, peers in _measured(rows)
        for peer in peers
        if _speed(ours) and _speed(peer)
    ]
    if not bars:
        return "no picture: nothing was timed"
    figure = Figure(figsize=(11, 1.2 + 0.4 * len(bars)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    axes = figure.add_subplot()
    places, ratios = range(len(bars)), [ratio for _, ratio in bars]
    axes.barh(places, ratios, color=["#d1495b" if ratio >= 1 else "#8a8a8a" for ratio in ratios])
    for place, ratio in zip(places, ratios, strict=True):
        axes.text(ratio, place, f" {ratio:.2f}", va="center", fontweight="bold")
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(places, [name for name, _ in bars], fontsize=9)
    axes.set_xlim(0, 1.12 * max(ratios))
    axes.invert_yaxis()
    axes.set_title(f"Tokens a second of ours over those of a peer\n{title}", fontsize=10, loc="left")
    figure.savefig(path)
    return f"picture: {path}"


def renew(page: Path, text: str) -> None:
    """Put `text` between the marks of the page, which gets a section for it if it has none."""
    old = page.read_text(encoding="utf-8") if page.is_file() else "# Performance\n"
    if BEGIN not in old:
        old += f"\n## A training step on one GPU\n\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _measured(rows: Rows) -> list[tuple[str, tuple[Job, Result], Rows]]:
    found = {
        (job.model, job.provider, job.memory, job.batch, job.data): (job, result) for job, result in rows
    }
    measured = []
    for case, (model, wanted) in CASES.items():
        there = [found.get((model, *configuration)) for configuration in wanted]
        if there[0] is not None:
            measured.append((case, there[0], [row for row in there[1:] if row is not None]))
    return measured


def _speed(row: tuple[Job, Result]) -> float:
    return row[1].get("tokens_per_second", 0.0)


def _line(row: tuple[Job, Result], ours: tuple[Job, Result] | None = None) -> list[str]:
    job, result = row
    memory = job.memory if job.data == "full" else f"{job.memory}, {job.data}"
    if "tokens_per_second" not in result:
        return [job.provider, memory, result.get("note", ""), "", "", "", ""]
    speed, peak = result["tokens_per_second"], result["peak_gib"]
    faster = less = ""
    if ours is not None and _speed(ours):
        faster = f"{_speed(ours) / speed:.2f} x"
        less = f"{ours[1]['peak_gib'] / peak:.2f}" if peak else ""
    spread = f"{result['step_ms']:.0f} ({result['step_ms_low']:.0f} to {result['step_ms_high']:.0f})"
    return [job.provider, memory, f"{speed:,.0f}", faster, f"{peak:.1f}" if peak else "-", less, spread]
