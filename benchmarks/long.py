"""Long contexts: peak memory of a training step against the plan, and its time.

The first layers of a model, in bfloat16 with random weights, random tokens, `liger_models.optim.AdamW` with
16 more bits per weight. A case is LAYERS[/ALL]:ROWSxTOKENS:LEVEL:WHERE[:METHOD[+host][:CAP]]:

    ALL      a model of so many layers is planned, and ballast takes the memory of the weights, gradients and
             optimizer state of the layers that do not run
    TOKENS   a number, or `max`: as many as fit a card of CAP, by the plan, with the optimizer's state
    LEVEL    of activation memory
    WHERE    the optimizer's state is: `device` or `host`
    METHOD   `full`; `lora`, or `nf4` or `int8` for LoRA on quantised weights: adapters in float32 on all
             linear layers, --rank; with `+host` the frozen weights are in host memory
    CAP      a card's memory, such as 24GiB: torch gets 0.5 GiB less after the model is loaded, and the plan
             0.95 of that, as by default

Rows are separate documents: two rows of half the tokens take the memory of one, and half the time in
attention. Run it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch

from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of
from liger_models.convert.sizes import parse_size

SUMMARY = "long contexts: peak memory of a training step against the plan"

CASES = (
    "4:8x8192:checkpoint:device",
    "4:8x8192:tiled:device",
    "4:8x8192:offload:host",
    # For training adapters of an 8B model on GPUs of 16 GB and 24 GB.
    "32:1x65536:offload:device:nf4:13.5GiB",
    "32:1x217000:offload:device:nf4:23.5GiB",
)


CONTEXT = 1 << 29  # bytes of a card that CUDA's context and libraries take


class Case(NamedTuple):
    """A case to measure."""

    layers: int
    rows: int
    seq: int  # 0: as many as the plan has
    level: str
    where: str
    method: str = "full"
    cap: int | None = None
    all_layers: int | None = None
    on_host: bool = False

    @property
    def name(self) -> str:
        cap = "" if self.cap is None else f":{self.cap / 2**30:g}GiB"
        layers = str(self.layers) if self.all_layers is None else f"{self.layers}/{self.all_layers}"
        method, seq = self.method + "+host" * self.on_host, self.seq or "max"
        return f"{layers}:{self.rows}x{seq}:{self.level}:{self.where}:{method}{cap}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS, help="(%(default)s)")
    parser.add_argument(
        "--case",
        action="append",
        type=_case,
        metavar="LAYERS[/ALL]:ROWSxTOKENS:LEVEL:WHERE[:METHOD[+host][:CAP]]",
        help=f"repeatable; default: {' '.join(CASES)}",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps, the first one untimed (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="time limit of a case's steps (%(default)s)"
    )
    parser.add_argument(
        "--short-first",
        action="store_true",
        help="take the first step, which makes the optimizer's state, with 1,024 tokens",
    )
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> int:
    """Run all cases; exit code 1 if one ran out of memory."""
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    for case in args.case or map(_case, CASES):
        if not case.seq:
            case = _longest(case, args)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append({"case": case.name} | _within_cap(case, args, device))
        print(rows[-1], flush=True)
        _write(args, device, rows)
    return int(any("note" in row for row in rows))


def _write(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Write the report so far."""
    header = ["layers", "trained", "rows x tokens", "level", "optimizer on", "cap GiB", "planned GiB"]
    header += ["peak GiB", "reserved GiB", "pinned on the host GiB", "s a step", "tokens/s"]
    table = []
    for row in rows:
        case = _case(row["case"])
        figures = [row.get(name) for name in ("planned", "peak", "reserved", "host")]
        seconds = row.get("seconds")
        rate = "-" if seconds is None else f"{case.rows * case.seq / seconds:,.0f}"
        table.append(
            [f"{case.layers}/{case.all_layers or case.layers}", case.method + " on the host" * case.on_host]
            + [f"{case.rows} x {case.seq:,}", case.level, case.where]
            + ["-" if case.cap is None else f"{case.cap / 2**30:g}"]
            + ["-" if figure is None else f"{figure:.1f}" for figure in figures]
            + [row["note"] if seconds is None else f"{seconds:.2f}", rate]
        )
    about = f"{machine(device, 'peft', 'bitsandbytes')}. {args.model}'s first layers, bfloat16, AdamW with "
    about += f"master weights; adapters of rank {args.rank} in float32."
    publish(args.out, "long", f"{about}\n\n{markdown_table(header, table)}", rows, show=len(rows) > 1)


def _within_cap(case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure a case, or return its plan with a note that it did not fit."""
    model, trained = _model(case, args, device)
    plan = _plan(case, args)
    ballast = None
    if case.all_layers is not None:
        held = plan.at_rest - _plan(case._replace(all_layers=None), args).at_rest
        ballast = torch.empty(held, dtype=torch.uint8, device=device)
    place = device.index or 0  # torch takes no device without a number here
    figures: dict[str, Any] = {"planned": plan.peak / 2**30, "moment": plan.moment, "host": plan.host / 2**30}
    figures["ballast"] = 0.0 if ballast is None else ballast.nbytes / 2**30
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if case.cap is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction((case.cap - CONTEXT) / total, place)
    try:
        return figures | _measure(case, args, device, model, trained)
    except torch.OutOfMemoryError:
        return figures | {"note": "out of memory"}
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, place)


def _model(
    case: Case, args: argparse.Namespace, device: torch.device
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Build the model with its trainable parameters."""
    import liger_models
    from liger_models.models.quantization import METHODS, quantise

    config = config_of(args.model, case.layers, case.seq)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta" if case.on_host else device}
    model = liger_models.from_config(config, activation_memory=case.level, **options).train()
    if case.on_host:
        _fill_on_host(model, device)
    if case.method != "full":
        from liger_models.training.adapters.lora_settings import LoraSettings
        from liger_models.training.lora import Adapters

        model.split_projections()
        if case.method in METHODS:
            quantise(model, case.method, device, case.on_host)
        Adapters(model, LoraSettings(r=args.rank), "none", seed=0)
        model.set_activation_memory(case.level)  # of the adapters' layers too
        if case.on_host:
            model.keep_weights_on_host(device)
    return model, [p for p in model.parameters() if p.requires_grad]


@torch.no_grad()
def _fill_on_host(model: Any, device: torch.device) -> None:
    """Random weights in host memory. One layer's weights are drawn on the device, and copied to all."""
    model.to_empty(device="cpu")
    drawn: dict[Any, torch.Tensor] = {}
    for p in model.parameters():
        if p.shape not in drawn:
            drawn[p.shape] = torch.empty_like(p, device=device).normal_(std=0.02).cpu()
        p.copy_(drawn[p.shape])


def _longest(case: Case, args: argparse.Namespace) -> Case:
    """The case with the longest rows that the plan has for its cap."""
    from liger_models.layers.memory import largest

    if case.cap is None:
        sys.exit(f"{case.name}: tokens 'max' need a cap")
    counted = _counted(case._replace(seq=1), args, first=False)
    levels, budget = [case.level] * (case.all_layers or case.layers), int(0.95 * (case.cap - CONTEXT))
    return case._replace(seq=largest(lambda n: counted.resized(case.rows, n).plan(levels, budget).fits))


def _plan(case: Case, args: argparse.Namespace) -> Any:
    return _counted(case, args).plan([case.level] * (case.all_layers or case.layers))


def _counted(case: Case, args: argparse.Namespace, first: bool | None = None) -> Any:
    """The memory of a step of the case's model: the last one that is run, or one of later steps if not the
    `first`, at whose end the optimizer's state is made.
    """
    import liger_models
    from liger_models.cli.plan import QUANTISED
    from liger_models.layers.memory import Step, StepMemory
    from liger_models.optim.adamw import state_bytes
    from liger_models.optim.host_state import lane_bytes

    config = config_of(args.model, case.all_layers or case.layers, case.seq)
    model = liger_models.from_config(config, device="meta", dtype=torch.bfloat16)
    on_host, adapted = case.where == "host", case.method != "full"
    state = state_bytes(torch.float32 if adapted else torch.bfloat16)
    first = args.steps == 1 if first is None else first
    there = 0 if first and not on_host else state
    step = Step(
        *(case.rows, case.seq, there),
        lora_rank=args.rank if adapted else 0,
        weight_bytes=QUANTISED.get(case.method),
        optimizer_on_host=on_host,
        optimizer_work=lane_bytes(state) if on_host else 0,
        weights_on_host=case.on_host,
    )
    return StepMemory(model, step)


def _measure(
    case: Case,
    args: argparse.Namespace,
    device: torch.device,
    model: Any,
    trained: list[torch.nn.Parameter],
) -> dict[str, Any]:
    from liger_models.optim.adamw import AdamW

    cuda = device.type == "cuda"
    optimizer = AdamW(trained, lr=1e-5, state_device="cpu" if case.where == "host" else None)
    vocab_size, seconds = model.spec.vocab_size, []
    while len(seconds) < args.steps and sum(seconds) + min(seconds, default=0.0) <= args.seconds:
        if cuda and len(seconds) < 2:  # of the model's making, and of the first step if there is another
            torch.cuda.reset_peak_memory_stats(device)
        seq = min(case.seq, 1024) if args.short_first and not seconds else case.seq
        ids = torch.randint(vocab_size, (case.rows, seq), device=device)
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
        "peak": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "reserved": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        "seconds": statistics.median(seconds[1:] or seconds),
        "steps": len(seconds),
        "loss": loss.item(),
    }


def _case(text: str) -> Case:
    pattern = (
        r"(\d+)(?:/(\d+))?:(\d+)x(\d+|max):(checkpoint|tiled|offload):(device|host)"
        r"(?::(full|lora|nf4|int8)(\+host)?(?::(.+))?)?"
    )
    match = re.fullmatch(pattern, text)
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected for instance {CASES[-1]}")
    layers, every, rows, seq, level, where, method, on_host, cap = match.groups()
    return Case(
        int(layers),
        int(rows),
        0 if seq == "max" else int(seq),
        level,
        where,
        method or "full",
        None if cap is None else parse_size(cap),
        None if every is None else int(every),
        on_host is not None,
    )
