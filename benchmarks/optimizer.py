"""A step of AdamW or Muon with clipping over a model's parameters: time, and fraction of a large copy's
bandwidth (AdamW).

Random parameters and gradients in bfloat16, with a model's shapes. Clipping is the norm of all gradients and
their scaling: in ours part of the step, in torch a separate pass. Bytes are those that must move, including
clipping's reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Meter
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.shapes import MODELS, config_of

SUMMARY = (
    "a step of AdamW with clipping, with each representation of bfloat16 weights, against torch's fused AdamW"
)

# Bytes per parameter that a step reads and writes; clipping reads the gradient, 2 bytes, again.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"weights": "plain"}, 14),
    "stochastic": ({"weights": "stochastic"}, 14),
    "stochastic, float32 moments": ({"weights": "stochastic", "moments": "float32"}, 22),
    "compensated": ({"weights": "compensated"}, 18),
    "master": ({"weights": "master"}, 18),
    "master, float32 moments": ({"weights": "master", "moments": "float32"}, 26),
}
ONE_BY_ONE = "master, one launch per tensor"
TORCH = "torch, fused"
MUON = ("muon", "muon_heads")  # bound by products: no bytes are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*MODES, ONE_BY_ONE, TORCH, *MUON]
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable; default: all but tiny")
    parser.add_argument("--layers", type=int, help="use only this many layers of each model")
    parser.add_argument("--mode", action="append", choices=names, help="repeatable; default: all but Muon")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    meter = Meter(device, args.quick)
    copy = meter.ceilings().copy
    rows = []
    for model in args.model or [name for name in MODELS if name != "tiny"]:
        for mode in args.mode or [*MODES, ONE_BY_ONE, TORCH]:
            row = {"model": model, "mode": mode} | _measure(model, args.layers, mode, meter, device, copy)
            rows.append(row)
            print(" ".join(f"{value}" for value in row.values()), file=sys.stderr, flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    header = ["model", "AdamW", "bytes per parameter", "clipping, ms", "step, ms", "both", "of a copy"]
    table = [
        [
            row["model"],
            row["mode"],
            str(row["bytes"] or ""),
            *(f"{row[part]:.2f}" for part in ("clip_ms", "step_ms", "both_ms")),
            f"{row['share']:.0%}" if row["bytes"] else "",
        ]
        for row in rows
    ]
    about = f"{machine(device)}. Copy {copy / 1e12:.2f} TB/s. bfloat16 weights and gradients."
    publish(args.out, "optimizer", f"{about}\n\n{markdown_table(header, table)}", rows)
    return 0


def _measure(
    model: str, layers: int | None, mode: str, meter: Meter, device: torch.device, copy: float
) -> dict[str, Any]:
    trained = _on_meta(model, layers).to_empty(device=device)
    parameters = list(trained.parameters())
    for parameter in parameters:
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.empty_like(parameter).normal_(std=1e-3)
    count = sum(parameter.numel() for parameter in parameters)
    options, step_bytes = MODES.get(mode, ({}, 14 if mode == TORCH else 18))
    clip, step = _calls_of_muon(mode, trained) if mode in MUON else _calls(mode, options, parameters)
    for call in (clip, step, step):  # creates the state, and compiles
        call()
    clip_ms, step_ms = (
        meter.time(lambda i, call=call: call(), sustained=True).median for call in (clip, step)
    )
    both = clip_ms + step_ms
    if mode in MUON:
        times = {"clip_ms": clip_ms, "step_ms": step_ms, "both_ms": both}
        return {"parameters": count, "bytes": 0, **times, "share": 0.0}
    moved = count * (step_bytes + 2)
    times = {"clip_ms": clip_ms, "step_ms": step_ms, "both_ms": both}
    return {"parameters": count, "bytes": step_bytes + 2, **times, "share": moved / copy / (both / 1e3)}


def _calls(
    mode: str, options: dict[str, Any], parameters: list[nn.Parameter]
) -> tuple[Callable[[], Any], ...]:
    """Clipping and a step; every step has the result of clipping."""
    from liger_models.optim.adamw import AdamW

    if mode == TORCH:
        fused = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0), fused.step
    groups: list[Any] = [[p] for p in parameters] if mode == ONE_BY_ONE else [parameters]
    optimizers = [AdamW(group, lr=1e-5, **options) for group in groups]
    whole = AdamW(parameters, lr=1e-5)

    def step() -> None:
        for optimizer in optimizers:
            optimizer._factors = factors
            optimizer.step()

    norm = whole.clip_grad_norm(1.0)
    factors: dict[torch.device, Tensor] = {norm.device: (1.0 / norm).clamp(max=1.0)}
    return lambda: whole.clip_grad_norm(1.0), step


def _calls_of_muon(mode: str, model: nn.Module) -> tuple[Callable[[], Any], ...]:
    """Clipping and a step, which is clipped only if the other has just been called."""
    from liger_models.training.optimizer import build_optimizer

    settings: dict[str, Any] = {"weights": "master", "moments": "auto", "seed": 0}
    optimizer = build_optimizer(model, lr=1e-5, weight_decay=0.1, name=mode, **settings)
    return lambda: optimizer.clip_grad_norm(1.0), optimizer.step


def _on_meta(model: str, layers: int | None) -> nn.Module:
    import liger_models

    return liger_models.from_config(config_of(model, layers), dtype=torch.bfloat16, device="meta")
