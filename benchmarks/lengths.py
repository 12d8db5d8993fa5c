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
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from benchmarks.ops import device_of
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of
from benchmarks.trl import trl_module

SUMMARY = "the longest sequences of post-training, and its memory and speed against TRL"

AIMS = {"dpo": 77_000, "kto": 82_000, "grpo": 150_000, "sft": 140_000}
ROWS = {"sft": 1, "grpo": 1, "dpo": 2, "kto": 2}
# Fields that TRL's trainers request from their head.
FIELDS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "grpo": ("log_probs", "entropy"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits", "is_top1"),
}
SIDES = ("checkpoint", "trl", "checkpoint+master", "lean")
TIMED = 16_384  # tokens; a longer case has one step, for its memory
Score = Callable[[Any, Tensor], Tensor]


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


def run(args: argparse.Namespace) -> int:
    device, begun = device_of(args.device), time.perf_counter()
    if args.gib is not None:
        size = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gib / size), device)
    beside = [Case(method, 8192, side) for side in SIDES for method in AIMS]
    rows: list[dict[str, Any]] = []
    for case in args.case or [Case(*aim, "checkpoint+master") for aim in AIMS.items()] + beside:
        if time.perf_counter() - begun > args.seconds:
            print(f"no time for {case.name}", flush=True)
            continue
        try:
            found = _measure(case, args, device)
        except torch.OutOfMemoryError:
            found = {"note": "out of memory"}
        except ImportError as error:
            found = {"note": f"not measured: {error}"}
        rows.append({"case": case.name, **found})
        print(rows[-1], flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _write(args, device, rows, show=False)
    _write(args, device, rows, show=True)
    return 0


def _write(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]], show: bool) -> None:
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
    publish(args.out, "lengths", f"{about}\n\n{markdown_table(header, table)}", rows, show)


def _measure(case: Case, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    config = config_of(args.model, seq=case.tokens)
    with_reference = case.method in ("dpo", "kto")
    side = _trl if case.side == "trl" else _ours
    torch.manual_seed(0)
    policy, reference, optimizer, score = side(case, config, device, with_reference)
    seconds, loss = [], torch.zeros(())
    steps = args.steps if case.tokens <= TIMED else 1
    for number in range(steps):
        if cuda:
            torch.cuda.synchronize(device)
            if number == 1 or steps == 1:  # the first step of several makes the optimizer's state
                torch.cuda.reset_peak_memory_stats(device)
        ids = torch.randint(config["vocab_size"], (ROWS[case.method], case.tokens), device=device)
        begun = time.perf_counter()
        loss = METHODS[case.method](score, policy, reference, ids)
        loss.backward()
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
        "first": seconds[0],
        "loss": loss.item(),
    }


# ------------------------------------------------------------------------------------------------ the methods


def _sft(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    return score(policy, ids)


def _grpo(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    log_probs = score(policy, ids)
    ratio = (log_probs - log_probs.detach()).exp()
    return -torch.minimum(0.5 * ratio, 0.5 * ratio.clamp(0.8, 1.2)).mean()


def _dpo(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        before = score(reference, ids).sum(1)
    chosen, rejected = (score(policy, ids).sum(1) - before).unbind()
    return -logsigmoid(0.1 * (chosen - rejected))


def _kto(score: Score, policy: Any, reference: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        strangers = ids.flip(1)
        divergence = (score(policy, strangers) - score(reference, strangers)).sum(1).mean().clamp(min=0)
        before = score(reference, ids).sum(1)
    good, bad = (score(policy, ids).sum(1) - before).unbind()
    return 1 - 0.5 * ((0.1 * (good - divergence)).sigmoid() + (0.1 * (divergence - bad)).sigmoid())


METHODS = {"sft": _sft, "grpo": _grpo, "dpo": _dpo, "kto": _kto}


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


def _trl(case: Case, config: dict[str, Any], device: torch.device, with_reference: bool) -> Any:
    import transformers

    add_fused_lm_head = trl_module("trainer.utils").add_fused_lm_head
    shape = dict(config)
    kind = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    with torch.device(device):
        policy = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).train()
        reference = (
            transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).eval()
            if with_reference
            else None
        )
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    add_fused_lm_head(policy, outputs=FIELDS[case.method])
    if reference is not None:
        add_fused_lm_head(reference)

    def score(model: Any, ids: Tensor) -> Tensor:
        found = model(ids, labels=ids, fused_lm_head=True, use_cache=False)
        return found.loss if case.method == "sft" else found.log_probs

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device.type == "cuda")
    return policy, reference, optimizer, score


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
