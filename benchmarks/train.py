"""A training step of a model's shape: tokens per second and peak memory, against transformers and
liger-kernel.

Measurements are implemented in `benchmarks/training`. Running out of memory is a result.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish, renew
from benchmarks.training import cases
from benchmarks.training.batches import DATA
from benchmarks.training.check import check_alone
from benchmarks.training.pool import measure_all
from benchmarks.training.shapes import MODELS, config_of
from benchmarks.training.step import Job, Result, check_provider
from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.layers.projections.float8 import RECIPES
from liger_models.training.observing.profiling import table

SUMMARY = (
    "a training step against transformers, and transformers with liger-kernel: tokens per second, peak memory"
)
DEFAULT = "llama-3-8b"
CONFIGURATIONS = (
    "ours:lean:2",
    "transformers+liger:none:2",
    "transformers:none:2",
    "ours:lean:4",
    "transformers+liger:none:4",
    "ours:checkpoint:8",
    "transformers+liger:checkpoint:8",
    "transformers:checkpoint:8",
    "ours:lean,checkpoint=4:8",
    "transformers+liger:none:8",
)
HEADER = (
    "model",
    "batch x seq",
    "provider",
    "activation memory",
    "tokens/s",
    "peak GiB",
    "planned GiB",
    "ms a step (spread)",
    "loss",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_model,
        action="append",
        metavar="SHAPE",
        help=f"repeatable. {', '.join(MODELS)}; or a config.json, or a file {{'config': ...}} ({DEFAULT})",
    )
    parser.add_argument("--layers", type=int, help="use only this many of the model's layers")
    parser.add_argument(
        "--configuration",
        action="append",
        type=_configuration,
        metavar="PROVIDER:MEMORY:BATCH[:DATA]",
        help="repeatable. PROVIDER: ours[+split|+compile|+graphs][+WEIGHTS][+FLOAT8], or transformers[+liger]"
        f"[+kernels][+compile|+regional][+ATTENTION][+EXPERTS][+PACKAGE][+FLOAT8]. WEIGHTS: our AdamW, "
        f"{', '.join(WEIGHTS)}. FLOAT8: {', '.join(RECIPES)}. MEMORY: for ours a "
        "level of activation memory, auto, or 'lean,checkpoint=4' (all lean, the last 4 layers checkpoint); "
        f"for the others none or checkpoint. DATA: {', '.join(DATA)}. "
        f"Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument(
        "--cases",
        action="store_true",
        help="instead run the cases of docs/performance.md, with ratios and a plot",
    )
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="a name or pattern of --cases, repeatable"
    )
    parser.add_argument(
        "--page", metavar="FILE", help="with --cases: update this page's table and the plot next to it"
    )
    parser.add_argument("--readme", metavar="FILE", help="with --cases: update the summary in this file")
    parser.add_argument(
        "--read", action="append", metavar="FILE", help="repeatable: measure nothing, read these JSON results"
    )
    parser.add_argument(
        "--seq", type=int, default=4096, help="tokens per sequence, except for --cases (%(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="also profile a step's kernels by purpose")
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    parser.add_argument(
        "--device",
        nargs="+",
        default=gpus,
        help=f"each measures one configuration at a time ({' '.join(gpus)})",
    )
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds per configuration (%(default)s)"
    )
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS", help="time limit (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    if args.read:
        report = Report.read(args.read)
    else:
        report = Report(_machine(args), args.warmup, args.steps)
        measure(args, report)
    text = _write(args, report)
    print(text, flush=True)
    if args.page:
        print(cases.draw(report.rows, report.machine, Path(args.page).with_name(cases.PICTURE)), flush=True)
    failed = [job for job, result in report.rows if result.get("note", "").startswith("failed") and job.ours]
    return 1 if failed else 0


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure everything requested, and check a peer in a separate process."""
    if args.cases:
        asked = cases.groups(args.case or ("*",))
        groups = [_jobs(model, seq, found, args) for model, seq, found in asked]
    else:
        found = args.configuration or [_configuration(text) for text in CONFIGURATIONS]
        groups = [_jobs(model, args.seq, found, args) for model in args.model or [DEFAULT]]
    results: dict[int, Result] = {}
    end = time.monotonic() + args.within
    jobs = [job for group in groups for job in group]
    ahead = args.device[0].startswith("cuda") and len(jobs) > 1
    for job, result in measure_all(groups, args.device, args.time_limit, ahead, args.within):
        results[jobs.index(job)] = result
        report.rows = [(jobs[i], results[i]) for i in sorted(results)]
        _write(args, report)
    if args.device[0].startswith("cuda"):
        report.checks = check_alone(report.rows, args.device[0], args.time_limit, end - time.monotonic())


def _jobs(model: str, seq: int, asked: Sequence[cases.Configuration], args: argparse.Namespace) -> list[Job]:
    config = config_of(model, args.layers, seq)
    name = model if model in MODELS else Path(model).stem
    if args.layers:
        name += f" ({args.layers} layers)"
    jobs = []
    for provider, memory, batch, data in asked:
        sizes = {"batch": batch, "seq": seq, "warmup": args.warmup, "steps": args.steps}
        jobs.append(Job(name, config, provider, memory, profile=args.profile, data=data, **sizes))
    return jobs


def _model(name: str) -> str:
    if name not in MODELS and not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of {', '.join(MODELS)}")
    return name


def _configuration(text: str) -> cases.Configuration:
    match = re.fullmatch(rf"([a-z_+0-9]+):([a-z,=.0-9]+):(\d+)(?::({'|'.join(DATA)}))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected for instance ours:lean:2")
    try:
        check_provider(match[1])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return match[1], match[2], int(match[3]), match[4] or "full"


def _name(args: argparse.Namespace) -> str:
    if args.cases:
        return "train-cases"
    models = args.model or [DEFAULT]
    return "-".join(["train", *(model if model in MODELS else Path(model).stem for model in models)])


@dataclass
class Report:
    """Results of one run, or of several on one machine.

    Attributes:
        machine: with library versions.
        warmup, steps: numbers of untimed and of timed steps.
        rows: jobs with their results.
        checks: results of `check_alone`.
    """

    machine: str
    warmup: int
    steps: int
    rows: Sequence[tuple[Job, Result]] = ()
    checks: Sequence[str] = ()

    @staticmethod
    def read(files: Sequence[str]) -> Report:
        """Read files written by `write`.

        Raises:
            ValueError: they are from different machines or versions.
        """
        found = [json.loads(Path(file).read_text()) for file in files]
        if len({one["machine"] for one in found}) > 1:
            raise ValueError(f"{', '.join(files)} are not from one machine with the same versions")
        rows = [(Job(config={}, **row["job"]), row["result"]) for one in found for row in one["rows"]]
        checks = [line for one in found for line in one["checks"]]
        return Report(found[0]["machine"], found[0]["warmup"], found[0]["steps"], rows, checks)

    def write(self, file: Path) -> None:
        rows = []
        for job, result in self.rows:
            fields = asdict(job)
            del fields["config"]
            rows.append({"job": fields, "result": dict(result)})
        others = {"machine": self.machine, "warmup": self.warmup, "steps": self.steps}
        file.write_text(json.dumps({**others, "checks": list(self.checks), "rows": rows}, indent=1) + "\n")


def _write(args: argparse.Namespace, report: Report) -> str:
    """Write the report so far, so that a kill loses nothing."""
    rows = report.rows
    about = f"{report.machine}. bfloat16 weights and fused AdamW; median of {report.steps} steps, each "
    about += "provider in a process of its own."
    found = cases.table(rows) if args.cases else markdown_table(HEADER, [_line(*row) for row in rows])
    parts = [about, found, *report.checks]
    parts += [text for job, result in rows if (text := _kernels(job, result))]
    text, name = "\n\n".join(parts), _name(args)
    fields = [{**asdict(job), **result} for job, result in rows]
    records = [{k: v for k, v in row.items() if k not in ("config", "kernels")} for row in fields]
    publish(args.out, name, text, records, show=False)
    report.write(Path(args.out) / f"{name}.json")
    if args.page:
        renew(Path(args.page), (cases.BEGIN, cases.END), "A training step on one GPU", text)
    if args.readme:
        renew(Path(args.readme), cases.SUMMARY_MARKS, "Measured", cases.summary(rows))
    return text


def _machine(args: argparse.Namespace) -> str:
    return machine(torch.device(args.device[0]), "transformers", "liger-kernel")


def _line(job: Job, result: Result) -> list[str]:
    values = [result.get("note", ""), "", "", "", ""]
    if "tokens_per_second" in result:
        peak = f"{result['peak_gib']:.1f}" if result["peak_gib"] is not None else "-"
        step = f"{result['step_ms']:.0f} ({result['step_ms_low']:.0f} to {result['step_ms_high']:.0f})"
        losses = f"{result['first_loss']:.2f} to {result['loss']:.2f}"
        planned = f"{result['planned_gib']:.1f}" if result.get("planned_gib") is not None else "-"
        values = [f"{result['tokens_per_second']:,.0f}", peak, planned, step, losses]
    size = f"{job.batch} x {job.seq}" if job.data == "full" else f"{job.batch} {job.data}"
    return [job.model, size, job.provider, job.memory, *values]


def _kernels(job: Job, result: Result) -> str:
    """Table of a step's kernels by purpose; empty if not requested."""
    found: Any = result.get("kernels")
    if not found:
        return ""
    return f"{job.model}, {job.provider}, {job.batch} x {job.seq}:\n\n{table(found)}"
