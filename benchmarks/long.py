"""Long contexts: peak memory of a training step beside what was planned, and its time.

The first layers of a model, in bfloat16 with fresh weights, random tokens, `liger_models.optim.AdamW` with 16
further bits a weight. A case is LAYERS:ROWSxTOKENS:LEVEL:WHERE, with a level of activation memory and where
the optimizer's state is, `device` or `host`. Rows do not see one another: two rows of half the tokens take
the memory of one, and half the time in attention.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from typing import Any, NamedTuple

import torch

from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of

SUMMARY = "long contexts: peak memory of a training step beside what was planned"

CASES = ("4:8x8192:checkpoint:device", "4:8x8192:tiled:device", "4:8x8192:offload:host")


class Case(NamedTuple):
    """What is measured."""

    layers: int
    rows: int
    seq: int
    level: str
    where: str

    @property
    def name(self) -> str:
        return f"{self.layers}:{self.rows}x{self.seq}:{self.level}:{self.where}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS, help="(%(default)s)")
    parser.add_argument(
        "--case",
        action="append",
        type=_case,
        metavar="LAYERS:ROWSxTOKENS:LEVEL:WHERE",
        help=f"repeatable; default: {' '.join(CASES)}",
    )
    parser.add_argument("--steps", type=int, default=3, help="of which the first is not timed (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    rows = []
    for case in args.case or map(_case, CASES):
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append({"case": case.name} | _measure(case, args, device))
        print(rows[-1], flush=True)
        _write(args, device, rows)
    return 0


def _write(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """The report so far."""
    header = ["layers", "rows x tokens", "level", "optimizer on", "planned GiB", "peak GiB", "reserved GiB"]
    header += ["pinned on the host GiB", "s a step", "tokens/s"]
    table = []
    for row in rows:
        case = _case(row["case"])
        figures = [row.get(name) for name in ("planned", "peak", "reserved", "host")]
        seconds = row["seconds"]
        table.append(
            [str(case.layers), f"{case.rows} x {case.seq:,}", case.level, case.where]
            + ["-" if figure is None else f"{figure:.1f}" for figure in figures]
            + [f"{seconds:.2f}", f"{case.rows * case.seq / seconds:,.0f}"]
        )
    about = f"{machine(device)}. {args.model}'s first layers, bfloat16, AdamW with master weights."
    publish(args.out, "long", f"{about}\n\n{markdown_table(header, table)}", rows, show=len(rows) > 1)


def _measure(case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    import liger_models
    from liger_models.host_state import lane_bytes
    from liger_models.layers.memory.plan import Step, StepMemory
    from liger_models.optim import AdamW, state_bytes

    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    config = config_of(args.model, case.layers, case.seq)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    model = liger_models.from_config(config, activation_memory=case.level, **options).train()
    on_host = case.where == "host"
    optimizer = AdamW(model.parameters(), lr=1e-5, state_device="cpu" if on_host else None)
    state = state_bytes(torch.bfloat16)
    work = lane_bytes(state) if on_host else 0
    there = state if on_host or args.steps > 1 else 0  # the first step ends with making it
    step = Step(case.rows, case.seq, there, optimizer_on_host=on_host, optimizer_work=work)
    plan = StepMemory(model, step).plan([case.level] * case.layers)  # type: ignore[list-item]

    seconds = []
    for number in range(args.steps):
        if cuda and number == min(1, args.steps - 1):
            torch.cuda.reset_peak_memory_stats(device)
        ids = torch.randint(config["vocab_size"], (case.rows, case.seq), device=device)
        begun = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return {
        "planned": plan.peak / 2**30,
        "moment": plan.moment,
        "peak": (torch.cuda.max_memory_allocated(device) - before) / 2**30 if cuda else None,
        "reserved": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        "host": plan.host / 2**30,
        "seconds": statistics.median(seconds[1:] or seconds),
        "loss": loss.item(),
    }


def _case(text: str) -> Case:
    match = re.fullmatch(r"(\d+):(\d+)x(\d+):(checkpoint|tiled|offload):(device|host)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected for instance {CASES[-1]}")
    layers, rows, seq, level, where = match.groups()
    return Case(int(layers), int(rows), int(seq), level, where)
