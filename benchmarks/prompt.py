"""Answers with a shared prompt: a step that computes the prompt once, against separate sequences.

Random weights in bfloat16 and random tokens. A step computes the scores of all answers' tokens and the
backward pass of a loss on them, without the optimizer, which does not depend on the batch. Variants:

| way      | input of the model                                                                 |
|----------|------------------------------------------------------------------------------------|
| `shared` | each prompt once, and the answers that continue it (losses/shared_prompts.py)      |
| `packed` | each answer after a copy of its prompt, packed into one row with cu_seqlens        |
| `rows`   | the same in rows, which have equal lengths here, so that SDPA can be used          |

Tokens per second count the answers' tokens, the same in all variants.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_model import add_model_arguments, build, milliseconds, publish_page
from benchmarks.report import markdown_table

SUMMARY = "answers with a shared prompt, computed once, against separate sequences"
TITLE = "Shared prompts"
CASES = ("1x2048:8x512", "4x2048:2x512")
HEADER = (
    "prompts",
    "answers to each",
    "way",
    "tokens",
    "answers' tokens/s",
    "vs. packed",
    "ms a step (spread)",
    "peak GiB",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, steps=5)
    parser.add_argument(
        "--case",
        action="append",
        type=_case,
        metavar="PROMPTSxTOKENS:ANSWERSxTOKENS",
        help=f"repeatable ({' '.join(CASES)})",
    )
    parser.add_argument("--way", action="append", choices=_WAYS, help=f"repeatable ({' '.join(_WAYS)})")


def run(args: argparse.Namespace) -> int:
    model, config, device, about = build(args)
    rows: list[dict[str, Any]] = []
    for case in args.case or map(_case, CASES):
        prompts, prompt, answers, answer = case
        torch.manual_seed(0)
        items = [
            (
                torch.randint(config["vocab_size"], (prompt,)),
                [torch.randint(config["vocab_size"], (answer,)) for _ in range(answers)],
            )
            for _ in range(prompts)
        ]
        for way in args.way or _WAYS:
            found = _measure(model, _WAYS[way](items), args.steps, device)
            rate = 1e3 * prompts * answers * answer / found["step_ms"]
            names = {"prompts": f"{prompts} of {prompt}", "answers": f"{answers} of {answer}", "way": way}
            rows.append({**names, "tokens_per_second": rate, **found})
    table = markdown_table(HEADER, (_line(row, rows) for row in rows))
    text = f"{about}; median of {args.steps} steps.\n\n{table}"
    publish_page(args, "prompt", text, rows, TITLE, "shared prompts")
    return 0


def _case(text: str) -> tuple[int, ...]:
    found = re.fullmatch(r"(\d+)x(\d+):(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected for instance {CASES[0]}")
    return tuple(map(int, found.groups()))


def _line(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    case = row["prompts"], row["answers"], "packed"
    packed = [one for one in rows if (one["prompts"], one["answers"], one["way"]) == case]
    factor = f"{packed[0]['step_ms'] / row['step_ms']:.2f} x" if packed else "-"
    spread = f"{row['step_ms']:.0f} ({row['step_ms_low']:.0f} to {row['step_ms_high']:.0f})"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    speed = f"{row['tokens_per_second']:,.0f}"
    names = row["prompts"], row["answers"], row["way"], f"{row['tokens']:,}"
    return [*names, speed, factor, spread, peak]


_Items = list[tuple[Tensor, list[Tensor]]]


def _shared(items: _Items) -> Mapping[str, Tensor]:
    from liger_models.losses import shared_prompts

    return shared_prompts(items)


def _rows(items: _Items) -> Mapping[str, Tensor]:
    apart = [(prompt, answer) for prompt, answers in items for answer in answers]
    labels = [torch.cat([torch.full_like(prompt, -100), answer]) for prompt, answer in apart]
    return {"input_ids": torch.stack([torch.cat(pair) for pair in apart]), "labels": torch.stack(labels)}


def _packed(items: _Items) -> Mapping[str, Tensor]:
    rows = _rows(items)
    number, length = rows["input_ids"].shape
    bounds = torch.arange(0, (number + 1) * length, length, dtype=torch.int32)
    return {name: x.view(1, -1) for name, x in rows.items()} | {"cu_seqlens": bounds}


_WAYS: Mapping[str, Callable[[_Items], Mapping[str, Tensor]]] = {
    "shared": _shared,
    "packed": _packed,
    "rows": _rows,
}


def _measure(model: Any, inputs: Mapping[str, Tensor], steps: int, device: torch.device) -> dict[str, Any]:
    # Boundaries are read on the CPU.
    batch = {name: x.to(device) if x.dim() == 2 else x for name, x in inputs.items()}
    labels, cuda = int((inputs["labels"] != -100).sum()), device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    losses: list[Tensor] = []

    def step() -> None:
        loss = -model.score(**batch).log_probs.sum() / labels
        loss.backward()
        losses.append(loss.detach())

    for _ in range(1 + steps):
        times.append(milliseconds(step, device))
        model.zero_grad(set_to_none=True)
    timed = times[1:]
    return {
        "tokens": inputs["input_ids"].numel(),
        "step_ms": statistics.median(timed),
        "step_ms_low": min(timed),
        "step_ms_high": max(timed),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "loss": losses[-1].item(),
    }
