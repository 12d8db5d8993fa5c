"""The cases of a training step on one GPU that docs/performance.md tells, as a table and a picture.

A case is ours first and then its peers, on the same model and data; a ratio is ours over a peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import bars, markdown_table
from benchmarks.training.step import Job, Result

Configuration = tuple[str, str, int, str]  # provider, activation memory, batch, data
Rows = Sequence[tuple[Job, Result]]

HEADER = (
    "case",
    "provider",
    "activation memory",
    "tokens/s",
    "ours is",
    "peak GiB",
    "planned GiB",
    "of its memory",
    "ms",
)
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


def groups() -> list[tuple[str, list[Configuration]]]:
    """All cases' configurations, each once and by model, those that are asked for first first. Transformers
    alone needs a process in which liger-kernel has changed nothing; FlexAttention compiles for minutes.
    """
    each = dict.fromkeys((model, one) for model, configurations in CASES.values() for one in configurations)
    found: dict[tuple[int, str], list[Configuration]] = {}
    for model, one in each:
        place = 2 if "flex_attention" in one[0] else int(one[0] == "transformers")
        found.setdefault((place, model), []).append(one)
    return [(model, found[place, model]) for place, model in sorted(found, key=lambda key: key[0])]


def table(rows: Rows) -> str:
    """What has been measured so far, as Markdown."""
    lines = []
    for case, ours, peers in _measured(rows):
        lines.append([case, *_line(ours)])
        lines += [["", *_line(peer, ours)] for peer in peers]
    return markdown_table(HEADER, lines)


def draw(rows: Rows, title: str, path: Path) -> str:
    """Write the picture: of each case and peer, how much faster ours is. Returns what was done."""
    ratios = [
        (f"{case}: {peer[0].provider} {peer[0].memory} {peer[0].data}", _speed(ours) / _speed(peer))
        for case, ours, peers in _measured(rows)
        for peer in peers
        if _speed(ours) and _speed(peer)
    ]
    return bars(path, f"Tokens a second of ours over those of a peer\n{title}", ratios, ".2f", line=1)


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
        return [job.provider, memory, result.get("note", ""), *[""] * 5]
    speed, peak, planned = result["tokens_per_second"], result["peak_gib"], result["planned_gib"]
    faster = less = ""
    if ours is not None and _speed(ours):
        faster = f"{_speed(ours) / speed:.2f} x"
        less = f"{ours[1]['peak_gib'] / peak:.2f}" if peak else ""
    spread = f"{result['step_ms']:.0f} ({result['step_ms_low']:.0f} to {result['step_ms_high']:.0f})"
    gib = ["-" if figure is None else f"{figure:.1f}" for figure in (peak, planned)]
    return [job.provider, memory, f"{speed:,.0f}", faster, *gib, less, spread]
