"""The longest sequences of post-training on one GPU, and memory and speed of a step, against TRL.

    python -m benchmarks lengths                                   # the target lengths, on 79 GiB
    python -m benchmarks lengths --case dpo:77000 --case sft:8192:lean --case sft:8192:trl

A case is METHOD:TOKENS[:SIDE]. A step is the forward and backward passes of rows of TOKENS tokens, all with
labels, and an AdamW step, of a whole model in bfloat16 with random weights:

    sft     one row and the mean loss of its tokens
    grpo    one row scored with entropies, with the loss of an answer of a group
    dpo     a pair, two rows, scored in the step by a separate reference model, as is TRL's default
    kto     two rows and two mismatched answers; the reference scores all four, the policy, too

Our side is a level of activation memory, `checkpoint` or `lean`, with our AdamW, which here uses plain
bfloat16 weights like torch's, 8 bytes per weight with gradient and moments; with `+master`, the default
elsewhere, it keeps 16 more bits, which make the weight float32.

TRL's side (`trl`) is the default of its trainers: transformers' model with gradient checkpointing and
`add_fused_lm_head` with each trainer's fields, and torch's fused AdamW.

On a GPU each case runs in a process of its own, and one of TRL's is measured again in a process that never
imports anything of ours.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.apart import add_rows_argument, rows_apart, write_rows
from benchmarks.ops import device_of
from benchmarks.peers import post_training
from benchmarks.peers.post_training import build_trl, time_training
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.check import compare, run_alone
from benchmarks.training.shapes import MODELS, config_of

SUMMARY = "the longest sequences of post-training, and its memory and speed against TRL"

AIMS = {"dpo": 77_000, "kto": 82_000, "grpo": 150_000, "sft": 140_000}
ROWS = {"sft": 1, "grpo": 1, "dpo": 2, "kto": 2}
SIDES = ("checkpoint", "trl", "checkpoint+master", "lean")
TIMED = 16_384  # tokens; a longer case has one step, for its memory


class Case(NamedTuple):
    """A case to measure."""

    method: str
    tokens: int
    side: str

    @property
    def name(self) -> str:
        return ":".join(map(str, self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gemma-3-1b", choices=MODELS, help="(%(default)s)")
    parser.add_argument(
        "--case",
        action="append",
        type=parse_case,
        metavar="METHOD:TOKENS[:SIDE]",
        help="repeatable; SIDE is trl, checkpoint or lean, the latter two with +master or without; default: "
        "the target lengths with checkpoint+master, and 8,192 on all sides",
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of short cases, all but the first timed (%(default)s)"
    )
    parser.add_argument("--gib", type=float, help="use only this much of a larger GPU, such as 79")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_rows_argument(parser)


def run(args: argparse.Namespace) -> int:
    device, begun = device_of(args.device), time.perf_counter()
    apart = device.type == "cuda" and args.rows is None
    if args.gib is not None:
        size = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gib / size), device)
    with_levels = [Case(method, 8192, side) for side in SIDES for method in AIMS]
    rows: list[dict[str, Any]] = []
    for case in args.case or [Case(*aim, "checkpoint+master") for aim in AIMS.items()] + with_levels:
        if time.perf_counter() - begun > args.seconds:
            print(f"no time for {case.name}", flush=True)
            continue
        try:
            found = _apart(case, args) if apart else _measure(case, args, device)
        except torch.OutOfMemoryError:
            found = {"note": "out of memory"}
        except ImportError as error:
            found = {"note": f"not measured: {error}"}
        rows.append({**found, "case": case.name})
        print(rows[-1], flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _write(args, device, rows, show=False)
    if args.rows is not None:
        write_rows(args.rows, rows)
        return 0
    _write(args, device, rows, True, *([_check(args, rows)] if apart else []))
    return 0


def _write(
    args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]], show: bool, *checks: str
) -> None:
    """Write the report so far, grouped by method and length."""
    header = ["method", "rows x tokens", "side", "peak GiB", "reserved GiB", "s a step", "tokens/s"]
    table = []
    for case, row in sorted(
        ((parse_case(row["case"]), row) for row in rows),
        key=lambda found: (-found[0].tokens, found[0].method),
    ):
        line = [case.method, f"{ROWS[case.method]} x {case.tokens:,}", side_name(case.side)]
        if "note" in row:
            table.append([*line, row["note"], "-", "-", "-"])
            continue
        memory = ["-" if row[name] is None else f"{row[name]:.1f}" for name in ("peak", "reserved")]
        speed = f"{ROWS[case.method] * case.tokens / row['seconds']:,.0f}"
        table.append([*line, *memory, f"{row['seconds']:.2f}", speed if case.tokens <= TIMED else "-"])
    about = f"{machine(device, 'transformers', 'trl')}. {args.model}, bfloat16, AdamW."
    about += "" if args.gib is None else f" At most {args.gib:g} GiB of the GPU."
    publish(args.out, "lengths", "\n\n".join([about, markdown_table(header, table), *checks]), rows, show)


def _measure(case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """In this process."""
    config, with_reference = config_of(args.model, seq=case.tokens), case.method in ("dpo", "kto")
    torch.manual_seed(0)
    if case.side == "trl":
        side = build_trl(case.method, config, device, with_reference)
    else:
        side = _ours(case, config, device, with_reference)
    steps = args.steps if case.tokens <= TIMED else 1
    shape = ROWS[case.method], case.tokens
    return time_training(case.method, side, config["vocab_size"], shape, steps, device)


def _apart(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    command = ["lengths", "--case", case.name, "--model", args.model, "--device", args.device]
    command += ["--steps", str(args.steps)]
    command += [] if args.gib is None else ["--gib", str(args.gib)]
    return {name: x for name, x in rows_apart(command, case.side)[0].items() if name != "provider"}


def _check(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Compare TRL's first timed case with its time in a process that never imports this package."""
    found = ((parse_case(row["case"]), row) for row in rows if "note" not in row)
    case, row = next(
        ((case, row) for case, row in found if case.side == "trl" and case.tokens <= TIMED), (None, {})
    )
    if case is None:
        return ""
    asked = {
        "method": case.method,
        "config": config_of(args.model, seq=case.tokens),
        "with_reference": case.method in ("dpo", "kto"),
        "rows": ROWS[case.method],
        "tokens": case.tokens,
        "steps": args.steps,
        "device": args.device,
    }
    alone = run_alone(Path(post_training.__file__), asked, 600)
    return compare(f"{args.model}, {case.name}", 1e3 * row["seconds"], alone)


# -------------------------------------------------------------------------------------------------- the sides


def _ours(case: Case, config: dict[str, Any], device: torch.device, with_reference: bool) -> Any:
    import liger_models
    from liger_models.optim.adamw import AdamW

    level, _, weights = case.side.partition("+")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    policy = liger_models.from_config(config, activation_memory=level, **options).train()
    reference = liger_models.from_config(config, **options).eval() if with_reference else None

    def score(model: Any, ids: Tensor) -> Tensor:
        if case.method == "sft":
            return model(ids, labels=ids).loss
        return model.score(ids, ids, entropy=case.method == "grpo").log_probs

    return policy, reference, AdamW(policy.parameters(), lr=1e-6, weights=weights or "plain"), score


def parse_case(text: str) -> Case:
    match = re.fullmatch(r"(sft|grpo|dpo|kto):(\d+)(?::(trl|(?:checkpoint|lean)(?:\+master)?))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected for instance dpo:77000, sft:8192:lean+master, or sft:8192:trl"
        )
    return Case(match[1], int(match[2]), match[3] or "checkpoint")


def side_name(side: str) -> str:
    """Name of a side in the table."""
    return "TRL" if side == "trl" else f"ours, {side.replace('+', ', ')}"
