"""All benchmarks of a machine with several GPUs, in separate processes with time limits, in less than ten
minutes.

| part         | what is measured                                                                         |
|--------------|------------------------------------------------------------------------------------------|
| 8B           | Llama-3-8B, 4 x 8192 per GPU, FSDP2: transformers with liger-kernel, checkpointed; ours  |
|              | at the planner's levels; the same work on all GPUs, and unsharded on each                |
| experts      | Qwen3-30B-A3B, 4 x 4096 per GPU: FSDP2 only, and expert parallelism over all GPUs        |
| hybrid       | 4 layers of Qwen3-Next-80B-A3B, three of them with the gated delta rule: the same        |
| float8       | 8B as above, with its linear layers' products in float8                                  |
| long context | one step of 8B on one row of the length that takes LONGEST seconds or less, its sequence |
|              | split over all GPUs; its peak against the plan                                           |
| checkpoint   | written by all GPUs, resumed on half of them, exported: see resume.py                    |

Failures, out-of-memory errors and timeouts get a line that says so. The results are written after each line:
the same command again measures only what is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import parallel, resume
from benchmarks.report import bars, machine, markdown_table, publish, renew
from benchmarks.training.shapes import config_of

SUMMARY = (
    "all of a machine with several GPUs: 8B, experts, a hybrid, float8, long contexts, a checkpoint; in "
    "under ten minutes"
)
MARKS = "<!-- several GPUs: python -m benchmarks node -->", "<!-- end of several GPUs -->"
TITLE, PICTURE = "A machine with several GPUs", "node.png"
HEADER = ("part", *parallel.HEADER)
LONGEST = 130.0  # computing seconds of the long context's step; with everything else it takes three minutes
OPERATIONS = 350e12  # per second and GPU in such a step, without recomputation
STRIDE = 65536  # granularity of row lengths in tokens

Row = dict[str, Any]


class Part(NamedTuple):
    """Results that are measured together.

    Attributes:
        seconds: time limit; all together less than ten minutes.
        layers: for `--smallest`.
        rows: creates its rows, given the arguments, a number of layers (None: all), and the seconds.
    """

    name: str
    seconds: float
    layers: int
    rows: Callable[[argparse.Namespace, int | None, float], Iterator[Row]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpus = torch.cuda.device_count()
    parser.add_argument("--processes", type=int, default=gpus or 2, help="one a GPU (%(default)s)")
    parser.add_argument(
        "--part", action="append", choices=[part.name for part in PARTS], help="repeatable; all"
    )
    parser.add_argument("--smallest", action="store_true", help="a few layers, two steps: a smoke test")
    parser.add_argument("--expert-layers", type=int, help="use only this many layers of Qwen3-30B-A3B")
    parser.add_argument("--folder", help="where checkpoints are written, and removed again (a temporary one)")
    parser.add_argument("--page", metavar="FILE", help="update this page's table, and the plot next to it")


def run(args: argparse.Namespace) -> int:
    path = Path(args.out) / "node.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    for part in PARTS:
        if (args.part and part.name not in args.part) or any(row["part"] == part.name for row in rows):
            continue
        begun = time.monotonic()
        layers = part.layers if args.smallest else None
        for row in part.rows(args, layers, part.seconds):
            rows.append({"part": part.name, "took": time.monotonic() - begun, **row})
            path.write_text(json.dumps(rows))
            _write(args, rows)
    print((Path(args.out) / "node.md").read_text(), flush=True)
    if args.page:
        page = Path(args.page)
        renew(page, MARKS, TITLE, (Path(args.out) / "node.md").read_text().strip())
        heading = f"Tokens a second of each GPU\n{_machine(args)}"
        print(bars(page.with_name(PICTURE), heading, _speeds(rows), ",.0f"), flush=True)
    return int(any(row["note"].startswith("failed") for row in rows if "note" in row))


# ------------------------------------------------------------------------------------------------ the parts


def _large(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    asked = ("transformers+liger:checkpoint:4", "ours:auto:4", "ours:lean:2", "ours:lean:2:alone")
    yield from _steps(args, "llama-3-8b", layers, 8192, asked, seconds)


def _experts(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    """With 100 GiB for each GPU, and tokens spread evenly over the experts."""
    asked = ("ours:auto=100:4", f"ours:auto=100:4:experts={args.processes}")
    yield from _steps(
        args, "qwen3-30b-a3b", layers or args.expert_layers, 4096, asked, seconds, balanced=True
    )


def _hybrid(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    asked = ("ours:lean:4", f"ours:lean:4:experts={args.processes}")
    yield from _steps(args, "qwen3-next-4", layers, 4096, asked, seconds, balanced=True)


def _float8(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    yield from _steps(args, "llama-3-8b", layers, 8192, ("ours+rowwise:auto:4",), seconds)


def _long(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    """The longest row; if it does not fit, half of it, and a quarter."""
    config, end = config_of("llama-3-8b", layers), time.monotonic() + seconds
    seq = 2 * STRIDE * args.processes if args.smallest else longest(config, args.processes)
    for part in (1, 2, 4):
        asked = (f"ours:offload:1:sequence={args.processes}",)
        left = end - time.monotonic()
        row = next(_steps(args, "llama-3-8b", layers, seq // part, asked, left, warmup=0, steps=1))
        yield row
        if row.get("note") != "out of memory":
            return


def _checkpoint(args: argparse.Namespace, layers: int | None, seconds: float) -> Iterator[Row]:
    """Of 7 GB; the smallest of 2."""
    config = config_of("llama-3.2-1b", layers)
    yield from resume.measure_all(config, 1024, args.processes, seconds, args.folder)


PARTS = (
    Part("8B", 125, 4, _large),
    Part("experts", 85, 12, _experts),
    Part("hybrid", 85, 4, _hybrid),
    Part("float8", 40, 4, _float8),
    Part("long context", 175, 4, _long),
    Part("checkpoint", 85, 2, _checkpoint),
)


def _steps(
    args: argparse.Namespace,
    model: str,
    layers: int | None,
    seq: int,
    asked: Sequence[str],
    seconds: float,
    warmup: int = 2,
    steps: int = 3,
    balanced: bool = False,
) -> Iterator[Row]:
    sizes = {"seq": seq, "warmup": warmup, "steps": steps, "balanced": balanced}
    jobs = [parallel.configuration(text) | sizes for text in asked]
    yield from parallel.measure_all(jobs, config_of(model, layers, seq), args.processes, seconds)


def longest(config: dict[str, Any], processes: int) -> int:
    """Tokens of a row whose step is computed in LONGEST seconds."""
    import liger_models
    from liger_models.layers.memory import largest
    from liger_models.training.observing.flops import StepFlops

    flops = StepFlops(liger_models.from_config(config, device="meta", dtype=torch.bfloat16))

    def in_time(strides: int) -> bool:
        tokens = strides * STRIDE
        return flops.of(torch.tensor([tokens]), tokens) <= LONGEST * OPERATIONS * processes

    return STRIDE * max(1, largest(in_time))


# ------------------------------------------------------------------------------------------------ the report


def _write(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    kept = ", the first layers of each" if args.smallest else ""
    about = f"{_machine(args)}. {args.processes} processes{kept}, bfloat16, fused AdamW; median of 3 steps."
    steps = [row for row in rows if "provider" in row]
    others = [row for row in rows if "provider" not in row]
    parts = [
        about,
        markdown_table(HEADER, [[row["part"], *parallel.cells(row, args.processes)] for row in steps]),
    ]
    if others:
        parts.append(markdown_table(resume.HEADER, map(resume.cells, others)))
    publish(args.out, "node", "\n\n".join(parts), rows, show=False)


def _machine(args: argparse.Namespace) -> str:
    return machine(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), "transformers", "liger-kernel"
    )


def _speeds(rows: Sequence[Row]) -> list[tuple[str, float]]:
    return [
        (f"{row['part']}: {row['provider']} {row['memory']} {row['sharing']}", row["tokens_per_second"])
        for row in rows
        if "tokens_per_second" in row
    ]
