"""A training step of vision-language models: tokens per second and peak memory, against liger-kernel.

Rows have `--seq` tokens of text with images of three sizes; every fourth row has two images. Transformers
pads rows of unequal length; here padding is not computed. Encoder, projector and language model are all
trained, with fused AdamW. Tokens per second are the language model's, without padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.report import machine, markdown_table, publish, renew
from benchmarks.training.batches import IMAGES
from benchmarks.training.check import check_alone
from benchmarks.training.pool import measure_all
from benchmarks.training.shapes import VISION_MODELS, config_of
from benchmarks.training.step import Job, Result, check_provider

SUMMARY = "a training step of vision-language models, against transformers with liger-kernel"
CONFIGURATIONS = ("ours:lean", "transformers+liger:none")
HEADER = ("model", "provider", "activation memory", "tokens/s", "speedup", "peak GiB", "memory ratio", "ms")
MARKS = "<!-- images: python -m benchmarks vision -->", "<!-- end of images -->"
TITLE = "Vision-language models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        choices=[*VISION_MODELS, "tiny-vl"],
        help=f"repeatable ({' '.join(VISION_MODELS)})",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="layers of the language model, the encoder is whole ("
        + ", ".join(f"{count} of {name}" for name, count in VISION_MODELS.items())
        + ")",
    )
    parser.add_argument(
        "--configuration",
        action="append",
        type=_configuration,
        metavar="PROVIDER:MEMORY",
        help="repeatable; as in `train`. The others are compared with the first "
        f"({' '.join(CONFIGURATIONS)})",
    )
    parser.add_argument("--batch", type=int, default=3, help="rows (%(default)s)")
    parser.add_argument("--seq", type=int, default=2048, help="text tokens per row (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="update this page's table")
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    parser.add_argument("--device", nargs="+", default=gpus, help=f"({' '.join(gpus)})")
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds per configuration (%(default)s)"
    )
    parser.add_argument(
        "--ahead", action="store_true", help="compile all kernels first, on all cores at once"
    )


def run(args: argparse.Namespace) -> int:
    groups = [_jobs(model, args) for model in args.model or VISION_MODELS]
    jobs = [job for group in groups for job in group]
    results: dict[int, Result] = {}
    for job, result in measure_all(groups, args.device, args.time_limit, args.ahead):
        results[jobs.index(job)] = result
        _write(args, [(jobs[i], results[i]) for i in sorted(results)])
    rows, checks = [(jobs[i], results[i]) for i in sorted(results)], []
    if args.device[0].startswith("cuda"):
        checks = check_alone(rows, args.device[0], args.time_limit)
    text = _write(args, rows, checks)
    print(text, flush=True)
    if args.page:
        renew(Path(args.page), MARKS, TITLE, text)
    failed = [jobs[i] for i, result in results.items() if "tokens_per_second" not in result and jobs[i].ours]
    return 1 if failed else 0


def _jobs(model: str, args: argparse.Namespace) -> list[Job]:
    layers = args.layers or VISION_MODELS.get(model)
    sizes = {"batch": args.batch, "seq": args.seq, "warmup": args.warmup, "steps": args.steps, "data": IMAGES}
    name = f"{model} ({layers} layers)" if layers else model
    asked = args.configuration or map(_configuration, CONFIGURATIONS)
    return [Job(name, config_of(model, layers), provider, memory, **sizes) for provider, memory in asked]


def _configuration(text: str) -> tuple[str, str]:
    provider, _, memory = text.partition(":")
    try:
        check_provider(provider)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not memory:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected for instance ours:lean")
    return provider, memory


def _write(args: argparse.Namespace, rows: Sequence[tuple[Job, Result]], checks: Sequence[str] = ()) -> str:
    """Write the report so far, so that a kill loses nothing."""
    about = (
        f"{machine(torch.device(args.device[0]), 'transformers', 'liger-kernel')}. bfloat16 weights and "
        f"fused AdamW, {args.batch} rows of {args.seq} tokens of text with images of three sizes; median of "
        f"{args.steps} steps, each provider in a process of its own."
    )
    first: dict[str, Result] = {}
    for job, result in rows:
        first.setdefault(job.model, result)
    lines = [_line(job, result, first[job.model]) for job, result in rows]
    records = [{k: v for k, v in {**asdict(job), **result}.items() if k != "config"} for job, result in rows]
    text = "\n\n".join([about, markdown_table(HEADER, lines), *checks])
    publish(args.out, "vision", text, records, show=False)
    return text


def _line(job: Job, result: Result, first: Result) -> list[str]:
    names = [job.model, job.provider, job.memory]
    if "tokens_per_second" not in result:
        return [*names, result.get("note", ""), "", "", "", ""]
    speed, peak = result["tokens_per_second"], result["peak_gib"]
    faster = less = ""
    if result is not first and "tokens_per_second" in first:
        faster = f"{first['tokens_per_second'] / speed:.2f} x"
        less = f"{first['peak_gib'] / peak:.2f}" if peak else ""
    step = f"{result['step_ms']:.0f} ({result['step_ms_low']:.0f} to {result['step_ms_high']:.0f})"
    return [*names, f"{speed:,.0f}", faster, f"{peak:.1f}" if peak else "-", less, step]
