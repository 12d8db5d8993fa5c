"""Scores and training steps in batch_invariant(), against the same model outside of it.

Random weights in bfloat16 and random tokens, packed into one row. Forward and training steps alternate with
and without the context, so that both meet the same clocks. `equal` is the share of documents whose
log-probabilities have the same bits alone as in the packed row.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_model import add_model_arguments, build, milliseconds, publish_page
from benchmarks.report import markdown_table

SUMMARY = "scores and training steps that do not depend on the batch, against ordinary ones"
TITLE = "Batch invariance"
CASES = ("1x8192", "16x512", "7x1000")
HEADER = ("documents", "step", "ordinary, ms", "invariant, ms", "ratio", "equal alone", "equal, ordinary")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, steps=5)
    parser.add_argument(
        "--case", action="append", metavar="DOCUMENTSxTOKENS", help=f"repeatable ({' '.join(CASES)})"
    )


def run(args: argparse.Namespace) -> int:
    model, config, device, about = build(args)
    rows = []
    for case in args.case or CASES:
        count, length = map(int, case.split("x"))
        torch.manual_seed(0)
        documents = [torch.randint(config["vocab_size"], (length,)) for _ in range(count)]
        equal = {way: _equal_alone(model, documents, device, way) for way in (False, True)}
        for step in ("score", "train"):
            ordinary, invariant = _measure(model, documents, args.steps, device, step == "train")
            rows.append([case, step, f"{ordinary:.1f}", f"{invariant:.1f}", f"{invariant / ordinary:.3f}"])
            rows[-1] += [f"{equal[True]} of {len(documents)}", f"{equal[False]} of {len(documents)}"]
            print(*rows[-1], flush=True)
    text = f"{about}; median of {args.steps} steps.\n\n{markdown_table(HEADER, rows)}"
    table = [dict(zip(HEADER, row, strict=True)) for row in rows]
    publish_page(args, "invariant", text, table, TITLE, "batch invariance")
    return 0


def _batch(documents: list[Tensor], device: torch.device) -> dict[str, Tensor]:
    ids = torch.cat(documents)[None].to(device)
    bounds = torch.tensor([0, *map(len, documents)]).cumsum(0).int()
    return {"input_ids": ids, "labels": ids, "cu_seqlens": bounds}


def _context(invariant: bool) -> Any:
    import liger_models

    return liger_models.batch_invariant() if invariant else nullcontext()


@torch.no_grad()
def _equal_alone(model: Any, documents: list[Tensor], device: torch.device, invariant: bool) -> int:
    """Number of documents whose log-probabilities are the same by themselves and packed."""
    with _context(invariant):
        packed = model.score(**_batch(documents, device)).log_probs[0]
        ends = torch.tensor([0, *map(len, documents)]).cumsum(0).tolist()
        alone = [model.score(**_batch([document], device)).log_probs[0] for document in documents]
    pairs = zip(ends, alone, strict=False)
    return sum(torch.equal(packed[start : start + len(own)], own) for start, own in pairs)


def _measure(
    model: Any, documents: list[Tensor], steps: int, device: torch.device, train: bool
) -> tuple[float, float]:
    """Median milliseconds of an ordinary step, and of a batch-invariant one."""
    batch, labels = _batch(documents, device), sum(len(document) - 1 for document in documents)

    def step(invariant: bool) -> None:
        with torch.set_grad_enabled(train), _context(invariant):
            scores = model.score(**batch).log_probs
        if train:
            (-scores.sum() / labels).backward()
            model.zero_grad(set_to_none=True)

    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(1 + steps):
        for invariant in times:
            taken = milliseconds(lambda way=invariant: step(way), device)  # type: ignore[misc]
            if number:
                times[invariant].append(taken)
    return statistics.median(times[False]), statistics.median(times[True])
