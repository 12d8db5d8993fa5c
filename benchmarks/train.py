"""A training step of a model's shape: tokens a second and peak memory, beside transformers and liger-kernel.

What is measured, and how, is in `benchmarks/training`. That memory does not suffice is a result.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish, renew
from benchmarks.training import cases
from benchmarks.training.batches import DATA
from benchmarks.training.pool import measure_all
from benchmarks.training.shapes import MODELS, config_of
from benchmarks.training.step import Job, Result, check_provider
from liger_models.kernels.optimizer.adamw import WEIGHTS
from liger_models.training.profiling import table

SUMMARY = (
    "a training step beside transformers, and transformers with liger-kernel: tokens a second, peak memory"
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
    parser.add_argument("--layers", type=int, help="of the model's layers only the first so many")
    parser.add_argument(
        "--configuration",
        action="append",
        type=_configuration,
        metavar="PROVIDER:MEMORY:BATCH[:DATA]",
        help="repeatable. PROVIDER: ours[+split|+compile][+WEIGHTS], or transformers[+liger][+compile]"
        f"[+ATTENTION][+EXPERTS]. WEIGHTS: our AdamW, {', '.join(WEIGHTS)}. MEMORY: for ours a level of "
        "activation memory, auto, or 'lean,checkpoint=4' (all lean, the last 4 layers checkpoint); for the "
        f"others none or checkpoint. DATA: {', '.join(DATA)}. "
        f"Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument(
        "--cases",
        action="store_true",
        help="in place of these the cases of docs/performance.md, with ratios and a picture",
    )
    parser.add_argument(
        "--page", metavar="FILE", help="with --cases: renew this page's table and the picture beside it"
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens a sequence (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="also say what the kernels of a step are for")
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    parser.add_argument(
        "--device",
        nargs="+",
        default=gpus,
        help=f"each measures one configuration at a time ({' '.join(gpus)})",
    )
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds for a configuration (%(default)s)"
    )
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS", help="for all (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    if args.cases:
        groups = [_jobs(model, found, args) for model, found in cases.groups()]
    else:
        asked = args.configuration or [_configuration(text) for text in CONFIGURATIONS]
        groups = [_jobs(model, asked, args) for model in args.model or [DEFAULT]]
    results: dict[int, Result] = {}
    jobs = [job for group in groups for job in group]
    ahead = args.device[0].startswith("cuda") and len(jobs) > 1
    for job, result in measure_all(groups, args.device, args.time_limit, ahead, args.within):
        results[jobs.index(job)] = result
        _write(args, [(jobs[i], results[i]) for i in sorted(results)])
    rows = [(jobs[i], results[i]) for i in sorted(results)]
    print((Path(args.out) / f"{_name(args)}.md").read_text(), flush=True)
    if args.page:
        print(cases.draw(rows, _machine(args), Path(args.page).with_name(cases.PICTURE)), flush=True)
    failed = [job for job, result in rows if result.get("note", "").startswith("failed") and job.ours]
    return 1 if failed else 0


def _jobs(model: str, asked: Sequence[cases.Configuration], args: argparse.Namespace) -> list[Job]:
    config = config_of(model, args.layers, args.seq)
    name = model if model in MODELS else Path(model).stem
    if args.layers:
        name += f" ({args.layers} layers)"
    jobs = []
    for provider, memory, batch, data in asked:
        sizes = {"batch": batch, "seq": args.seq, "warmup": args.warmup, "steps": args.steps}
        jobs.append(Job(name, config, provider, memory, profile=args.profile, data=data, **sizes))
    return jobs


def _model(name: str) -> str:
    if name not in MODELS and not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of {', '.join(MODELS)}")
    return name


def _configuration(text: str) -> cases.Configuration:
    match = re.fullmatch(rf"([a-z_+]+):([a-z,=0-9]+):(\d+)(?::({'|'.join(DATA)}))?", text)
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


def _write(args: argparse.Namespace, rows: Sequence[tuple[Job, Result]]) -> None:
    """The report so far: what is killed leaves what it had."""
    about = f"{_machine(args)}. bfloat16 weights and fused AdamW; median of {args.steps} steps."
    found = cases.table(rows) if args.cases else markdown_table(HEADER, [_line(*row) for row in rows])
    parts = [about, found]
    parts += [text for job, result in rows if (text := _kernels(job, result))]
    fields = [{**asdict(job), **result} for job, result in rows]
    records = [{k: v for k, v in row.items() if k not in ("config", "kernels")} for row in fields]
    publish(args.out, _name(args), "\n\n".join(parts), records, show=False)
    if args.page:
        renew(Path(args.page), (cases.BEGIN, cases.END), "A training step on one GPU", "\n\n".join(parts))


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
    """What the kernels of a step are for, as a table; nothing if that was not asked."""
    found: Any = result.get("kernels")
    if not found:
        return ""
    return f"{job.model}, {job.provider}, {job.batch} x {job.seq}:\n\n{table(found)}"
