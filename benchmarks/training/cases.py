"""Training step cases on one GPU in docs/performance.md, with table and plot.

A case lists ours first and then its peers, on the same model and data; ratios are ours relative to a peer.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import bars, markdown_table
from benchmarks.training.step import Job, Result

MEMORY = {"none": "no checkpointing", "checkpoint": "checkpointing"}  # of peers
Configuration = tuple[str, str, int, str]  # provider, activation memory, batch, data
Rows = Sequence[tuple[Job, Result]]

HEADER = (
    "case",
    "provider",
    "activation memory",
    "tokens/s",
    "speedup",
    "peak GiB",
    "planned GiB",
    "memory ratio",
    "ms",
)
BEGIN, END = "<!-- training step: python -m benchmarks train --cases -->", "<!-- end of the training step -->"
SUMMARY_MARKS = "<!-- measured: python -m benchmarks train --cases -->", "<!-- end of measured -->"
PICTURE = "performance.png"
LARGE, SMALL, EXPERTS = "llama-3-8b", "llama-3.2-1b", "qwen3-30b-a3b-6"


class Case(NamedTuple):
    """Ours first, then its peers.

    Attributes:
        model: one of `shapes.MODELS`.
        configurations: one per provider.
        seq: tokens per sequence.
        summary: the case's name in the README; None omits it there.
    """

    model: str
    configurations: tuple[Configuration, ...]
    seq: int = 4096
    summary: str | None = None


def _full(level: str, batch: int, *peers: str, peers_keep: str = "none") -> tuple[Configuration, ...]:
    """Ours at a level of activation memory, and peers, on rows without padding."""
    return ("ours", level, batch, "full"), *((peer, peers_keep, batch, "full") for peer in peers)


def _documents(batch: int) -> tuple[Configuration, ...]:
    """Ours and peers on packed documents; one peer also with padding."""
    liger = "transformers+liger"
    return (
        ("ours", "lean", batch, "packed"),
        (f"{liger}+varlen", "none", batch, "packed"),
        (liger, "none", batch, "padded"),
        (liger, "none", batch, "packed"),
    )


def _rounding(weights: str) -> tuple[Configuration, ...]:
    return (f"ours+{weights}", "lean", 4, "full"), ("ours+plain", "lean", 4, "full")


LIGER, PLAIN = "transformers+liger", "transformers"
MAMBA = "transformers+sdpa+mamba_ssm+causal_conv1d"
MAMBA_EXPERTS = "transformers+sdpa+grouped_mm+mamba_ssm+causal_conv1d"
CONVOLUTIONS = "transformers+sdpa+causal_conv1d"

CASES: Mapping[str, Case] = {
    "8B, 8 x 4096, as much kept as fits": Case(
        LARGE,
        _full("auto", 8, LIGER, PLAIN, peers_keep="checkpoint"),
        summary="Llama-3-8B, 8 x 4096",
    ),
    "8B, 8 x 4096, checkpointed": Case(LARGE, _full("checkpoint", 8, LIGER, PLAIN, peers_keep="checkpoint")),
    "8B, 4 x 4096, nothing recomputed": Case(LARGE, _full("lean", 4, LIGER), summary="Llama-3-8B, 4 x 4096"),
    "1B, 8 x 2048, nothing recomputed": Case(
        SMALL, _full("lean", 8, LIGER, PLAIN), seq=2048, summary="Llama-3.2-1B, 8 x 2048"
    ),
    "1B, 16 documents, 75% masked": Case(SMALL, _documents(16), summary="Llama-3.2-1B, 16 documents"),
    "8B, 4 documents, 75% masked": Case(LARGE, _documents(4)),
    "Qwen3-30B-A3B, 6 layers, 4 x 4096": Case(
        EXPERTS,
        _full("lean", 4, f"{LIGER}+sdpa+grouped_mm", f"{LIGER}+sdpa", f"{PLAIN}+sdpa+grouped_mm"),
        summary="Qwen3-30B-A3B's shape, 6 layers, 4 x 4096",
    ),
    "Qwen3-Next, 4 layers, 4 x 4096": Case(
        "qwen3-next-4", _full("lean", 4, f"{PLAIN}+sdpa+grouped_mm+fla+causal_conv1d")
    ),
    "Qwen3.5-9B, 4 layers, 4 x 4096": Case(
        "qwen3.5-9b-4", _full("lean", 4, f"{PLAIN}+sdpa+fla+causal_conv1d")
    ),
    "Granite-4-H-Small, 4 layers, 4 x 4096": Case("granite-4-h-small-4", _full("lean", 4, MAMBA_EXPERTS)),
    "Granite-4-H-Micro, 10 layers, 4 x 4096": Case("granite-4-h-micro-10", _full("lean", 4, MAMBA)),
    "Nemotron-H-8B, 9 layers, 4 x 4096": Case("nemotron-h-8b-9", _full("lean", 4, MAMBA)),
    "LFM2-2.6B, 8 layers, 4 x 4096": Case("lfm2-2.6b-8", _full("lean", 4, CONVOLUTIONS)),
    # With four fifths and three quarters of a peer's memory.
    "8B, 4 x 4096, within 91.7 GiB": Case(LARGE, _full("auto=91.7", 4, LIGER)),
    "Granite-4-H-Small, 4 layers, 4 x 4096, within 34 GiB": Case(
        "granite-4-h-small-4", _full("auto=34", 4, MAMBA_EXPERTS)
    ),
    "Granite-4-H-Micro, 10 layers, 4 x 4096, within 22 GiB": Case(
        "granite-4-h-micro-10", _full("auto=22", 4, MAMBA)
    ),
    "Nemotron-H-8B, 9 layers, 4 x 4096, within 20 GiB": Case("nemotron-h-8b-9", _full("auto=20", 4, MAMBA)),
    "LFM2-2.6B, 8 layers, 4 x 4096, within 20 GiB": Case("lfm2-2.6b-8", _full("auto=20", 4, CONVOLUTIONS)),
    # Without peers: transformers 5.17 leaks states between packed documents.
    "Qwen3-Next, 4 layers, 18 documents, 75% masked": Case("qwen3-next-4", (("ours", "lean", 18, "packed"),)),
    "Qwen3.5-9B, 4 layers, 18 documents, 75% masked": Case("qwen3.5-9b-4", (("ours", "lean", 18, "packed"),)),
    "8B, 4 x 4096, stochastic weights": Case(LARGE, _rounding("stochastic")),
    "8B, 4 x 4096, compensated weights": Case(LARGE, _rounding("compensated")),
}


def groups(patterns: Sequence[str] = ("*",)) -> list[tuple[str, int, list[Configuration]]]:
    """Configurations of the matching cases, each once, by model and length, in the cases' order."""
    found: dict[tuple[str, int], dict[Configuration, None]] = {}
    for name, case in CASES.items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            found.setdefault((case.model, case.seq), {}).update(dict.fromkeys(case.configurations))
    return [(model, seq, [*configurations]) for (model, seq), configurations in found.items()]


def table(rows: Rows) -> str:
    """Results so far, as Markdown."""
    lines = []
    for case, ours, peers in _measured(rows):
        lines.append([case, *_line(ours)])
        lines += [["", *_line(peer, ours)] for peer in peers]
    return markdown_table(HEADER, lines)


def draw(rows: Rows, title: str, path: Path) -> str:
    """Plot our speedup for each case and peer. Returns a status message."""
    ratios = [
        (f"{_case_name(case)}\nrelative to {', '.join(_names(peer[0]))}", _speed(ours) / _speed(peer))
        for case, ours, peers in _measured(rows)
        for peer in peers
        if _speed(ours) and _speed(peer)
    ]
    heading = "Speed of a training step with liger_models, relative to other libraries (tokens/s; 1: as fast)"
    return bars(path, f"{heading}\n{title}", ratios, ".2f", line=1)


def _case_name(case: str) -> str:
    size, _, rest = case.partition(", ")
    return f"{ {'8B': 'Llama-3-8B', '1B': 'Llama-3.2-1B'}.get(size, size) }, {rest}"


def _names(job: Job) -> list[str]:
    """A peer and its settings, in words."""
    names = {
        "transformers": "transformers",
        "liger": "liger-kernel",
        "varlen": "FlashAttention 2",
        "sdpa": "SDPA",
        "grouped_mm": "grouped_mm",
        "fla": "flash-linear-attention",
    }
    library = " + ".join(names[part] for part in ("transformers", "liger") if part in job.provider.split("+"))
    more = [names.get(name, name) for name in job.provider.split("+")[1:] if name != "liger"]
    kept = MEMORY.get(job.memory, job.memory)
    return [library or job.provider, *more, kept, *([job.data] if job.data != "full" else [])]


def summary(rows: Rows) -> str:
    """The README's table: cases with a summary, ours and the fastest peers."""
    lines = []
    for case, ours, peers in _measured(rows):
        name = CASES[case].summary
        kinds = {"transformers+liger": None, "transformers": None}
        fastest = [
            max((peer for peer in peers if _kind(peer) == kind), key=_speed, default=None) for kind in kinds
        ]
        for row in [ours, *fastest] if name is not None and _speed(ours) else []:
            if row is not None and _speed(row):
                lines.append(_summary_line(name, row, ours))
                name = ""
    return markdown_table(SUMMARY_HEADER, lines)


SUMMARY_HEADER = ("a training step of", "", "activation memory", "tokens/s", "speedup", "peak GiB")


def _kind(row: tuple[Job, Result]) -> str:
    return "transformers" + "+liger" * ("liger" in row[0].options)


def _summary_line(name: str | None, row: tuple[Job, Result], ours: tuple[Job, Result]) -> list[str]:
    job, result = row
    kept = f"`{job.memory}`" if job.ours else MEMORY[job.memory]
    if job.data != "full":
        kept += f", {job.data}"
    speed, peak = f"{_speed(row):,.0f}", f"{result['peak_gib']:.1f}" if result["peak_gib"] else "-"
    if job.ours:
        return [name or "", "**liger_models**", kept, f"**{speed}**", "", peak]
    provider = "transformers + liger-kernel" if "liger" in job.options else "transformers"
    return [name or "", provider, kept, speed, f"{_speed(ours) / _speed(row):.2f} x", peak]


def _measured(rows: Rows) -> list[tuple[str, tuple[Job, Result], Rows]]:
    found = {
        (job.model, job.seq, job.provider, job.memory, job.batch, job.data): (job, result)
        for job, result in rows
    }
    measured = []
    for name, case in CASES.items():
        there = [found.get((case.model, case.seq, *one)) for one in case.configurations]
        if there[0] is not None:
            measured.append((name, there[0], [row for row in there[1:] if row is not None]))
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
