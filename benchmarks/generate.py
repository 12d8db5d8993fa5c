"""Greedy generation with a model's shape: tokens per second, against transformers.

Random weights in bfloat16 and random prompts; no end tokens. A run processes the prompts and generates all
new tokens, including graph capture; one untimed run precedes the timed ones.

| provider              | is                                                                             |
|-----------------------|--------------------------------------------------------------------------------|
| `ours`                | `generate`, which replays CUDA graphs on a GPU                                 |
| `ours+eager`          | the same, kernel by kernel                                                     |
| `transformers`        | `generate`, with its dynamic cache                                             |
| `transformers+static` | with its static cache, for which transformers compiles the model on a GPU      |
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import machine, markdown_table, publish
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


def run(args: argparse.Namespace) -> int:
    device, config = torch.device(args.device), config_of(args.model)
    about = machine(device, "transformers")
    rows: list[dict[str, Any]] = []
    for provider in args.provider or PROVIDERS:
        torch.manual_seed(0)
        try:
            generate = _provider(provider, config, args.new, device)
        except ImportError as error:
            rows.append({"provider": provider, "note": str(error)})
            continue
        for batch in args.batch or [4, 1]:
            ids = torch.randint(config["vocab_size"], (batch, args.prompt), device=device)
            found = _measure(generate, ids, args.new, args.runs)
            rows.append({"provider": provider, "batch": batch, **found})
            lines = [_line(args, row) for row in rows]
            text = (
                f"{about}. bfloat16, greedy; median of {args.runs} runs.\n\n{markdown_table(HEADER, lines)}"
            )
            publish(args.out, f"generate-{args.model}", text, rows, show=False)
        del generate
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(text, flush=True)
    return 0


def _line(args: argparse.Namespace, row: dict[str, Any]) -> list[str]:
    if "note" in row:
        return [args.model, "", "", row["provider"], row["note"], "", ""]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    times = f"{row['token_ms']:.2f} ({row['token_ms_low']:.2f} to {row['token_ms_high']:.2f})"
    shape = f"{args.prompt} + {args.new}"
    speed = f"{row['tokens_per_second']:,.0f}"
    return [args.model, str(row["batch"]), shape, row["provider"], speed, times, peak]


def _measure(generate: Callable[[Tensor], Tensor], ids: Tensor, new: int, runs: int) -> dict[str, Any]:
    times = []
    for _ in range(1 + runs):
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        text = generate(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        if text.shape[1] != ids.shape[1] + new:
            raise RuntimeError(f"asked for {new} tokens, and got {text.shape[1] - ids.shape[1]}")
    timed = times[1:]
    median = statistics.median(timed)
    return {
        "tokens_per_second": len(ids) * new / median,
        "token_ms": 1e3 * median / new,
        "token_ms_low": 1e3 * min(timed) / new,
        "token_ms_high": 1e3 * max(timed) / new,
        "first_s": times[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ids.is_cuda else None,
    }


def _provider(provider: str, config: dict[str, Any], new: int, device: torch.device) -> Callable[..., Tensor]:
    """ids [batch, prompt] -> [batch, prompt + new]."""
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
    import transformers

    settings = copy.deepcopy(config)
    reference = getattr(transformers, find_architecture(settings.pop("model_type")).reference)
    with device:
        theirs = reference._from_config(reference.config_class(**settings), dtype=torch.bfloat16).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    options = {"cache_implementation": "static"} if provider.endswith("+static") else {}

    def reference_text(ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        return theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)

    return reference_text
