"""Greedy generation with a model's shape: tokens per second, against transformers.

Random weights in bfloat16 and random prompts; no end tokens. A run processes the prompts and generates all
new tokens, including graph capture; one untimed run precedes the timed ones. On a GPU each provider runs in a
process of its own, and a peer is measured again in a process that never imports anything of ours.

| provider              | is                                                                             |
|-----------------------|--------------------------------------------------------------------------------|
| `ours`                | `generate`, which replays CUDA graphs on a GPU                                 |
| `ours+eager`          | the same, kernel by kernel                                                     |
| `transformers`        | `generate`, with its dynamic cache                                             |
| `transformers+static` | with its static cache, for which transformers compiles the model on a GPU      |
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.apart import add_rows_argument, rows_apart, write_rows
from benchmarks.peers import generation as peer
from benchmarks.peers.generation import Generate, build_generator, time_generation
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training.check import compare, run_alone
from benchmarks.training.shapes import MODELS, config_of
from liger_models.architectures import find_architecture

SUMMARY = "generation against transformers: tokens per second"
PROVIDERS = ("ours", "ours+eager", "transformers", "transformers+static")
HEADER = ("model", "batch", "prompt + new", "provider", "tokens/s", "ms a token (spread)", "peak GiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b", help="(%(default)s)")
    parser.add_argument("--batch", type=int, action="append", help="repeatable: prompts at a time (4 1)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens per prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=128, help="new tokens (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs (%(default)s)")
    parser.add_argument(
        "--provider", action="append", choices=PROVIDERS, help=f"repeatable ({' '.join(PROVIDERS)})"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_rows_argument(parser)


def run(args: argparse.Namespace) -> int:
    device, providers = torch.device(args.device), args.provider or PROVIDERS
    apart = device.type == "cuda" and args.rows is None
    rows: list[dict[str, Any]] = []
    for provider in providers:
        rows += rows_apart(_command(args, provider), provider) if apart else _measure(args, provider, device)
        _write(args, device, rows)
    if args.rows is not None:
        write_rows(args.rows, rows)
        return 0
    checks = [_check(args, device, rows)] if apart else []
    print(_write(args, device, rows, *checks), flush=True)
    return 0


def _command(args: argparse.Namespace, provider: str) -> list[str]:
    command = ["generate", "--provider", provider, "--model", args.model, "--device", args.device]
    for name in ("prompt", "new", "runs"):
        command += [f"--{name}", str(getattr(args, name))]
    return command + [word for batch in args.batch or () for word in ("--batch", str(batch))]


def _measure(args: argparse.Namespace, provider: str, device: torch.device) -> list[dict[str, Any]]:
    """In this process."""
    config = config_of(args.model)
    torch.manual_seed(0)
    try:
        generate = _provider(provider, config, args.new, device)
    except ImportError as error:
        return [{"provider": provider, "note": str(error)}]
    rows = []
    for batch in args.batch or [4, 1]:
        ids = torch.randint(config["vocab_size"], (batch, args.prompt), device=device)
        found = time_generation(generate, ids, args.new, args.runs)
        rows.append({"provider": provider, "batch": batch, **found})
    return rows


def _check(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]]) -> str:
    """Compare the first peer with its time in a process that never imports this package."""
    row = next((row for row in rows if not row["provider"].startswith("ours") and "note" not in row), None)
    if row is None:
        return ""
    config = config_of(args.model)
    asked = {
        "config": config,
        "reference": find_architecture(config["model_type"]).reference,
        "static": row["provider"].endswith("+static"),
        "ids": torch.randint(config["vocab_size"], (row["batch"], args.prompt)),
        "new": args.new,
        "runs": args.runs,
        "device": str(device),
    }
    alone = run_alone(Path(peer.__file__), asked, 600)
    name = f"{args.model}, {row['provider']}, batch {row['batch']}"
    return compare(name, args.new * row["token_ms"], alone)


def _write(args: argparse.Namespace, device: torch.device, rows: list[dict[str, Any]], *checks: str) -> str:
    """The report so far."""
    about = f"{machine(device, 'transformers')}. bfloat16, greedy; median of {args.runs} runs."
    text = "\n\n".join([about, markdown_table(HEADER, [_line(args, row) for row in rows]), *checks])
    publish(args.out, f"generate-{args.model}", text, rows, show=False)
    return text


def _line(args: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    if "note" in row:
        return [args.model, "", "", row["provider"], row["note"], "", ""]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    times = f"{row['token_ms']:.2f} ({row['token_ms_low']:.2f} to {row['token_ms_high']:.2f})"
    shape = f"{args.prompt} + {args.new}"
    speed = f"{row['tokens_per_second']:,.0f}"
    return [args.model, str(row["batch"]), shape, row["provider"], speed, times, peak]


def _provider(provider: str, config: dict[str, Any], new: int, device: torch.device) -> Generate:
    if provider.startswith("ours"):
        import liger_models
        from liger_models.generating import generation

        model = liger_models.from_config(config, dtype=torch.bfloat16, device=device).eval()
        recorded = generation.can_be_recorded if provider == "ours" else lambda model: False

        def ours(ids: Tensor) -> Tensor:
            kept, generation.can_be_recorded = generation.can_be_recorded, recorded
            try:
                return model.generate(ids, new)
            finally:
                generation.can_be_recorded = kept

        return ours
    reference = find_architecture(config["model_type"]).reference
    return build_generator(config, reference, provider.endswith("+static"), new, device)
