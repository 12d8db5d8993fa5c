"""Shared parts of the benchmarks that time steps of one model: options, the model, a clock and the page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, publish, renew
from benchmarks.training.shapes import MODELS, config_of


def add_model_arguments(parser: argparse.ArgumentParser, steps: int, memory: bool = True) -> None:
    """Add the options of the model, its device and the page; `steps` is the default number of timed steps."""
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="use only this many of the model's layers (default: all)")
    if memory:
        parser.add_argument("--memory", default="lean", help="level of activation memory (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="update this page's table")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def build(args: argparse.Namespace) -> tuple[Any, dict[str, Any], torch.device, str]:
    """Build the model with random weights in bfloat16.

    Returns:
        The model, its config, its device, and a description of all three with the machine.
    """
    import liger_models

    device, config = torch.device(args.device), config_of(args.model, args.layers)
    about = f"{machine(device)}. {args.model}, {config['num_hidden_layers']} layers, bfloat16"
    options = {}
    if "memory" in args:
        options["activation_memory"] = args.memory
        about += f", {args.memory}"
    model = liger_models.from_config(config, dtype=torch.bfloat16, device=device, **options).train()
    return model, config, device, about


def milliseconds(function: Callable[[], None], device: torch.device) -> float:
    """Run a function and return its time until the device has finished, in ms."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    function()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def publish_page(
    args: argparse.Namespace, name: str, text: str, rows: Sequence[dict[str, Any]], title: str, mark: str
) -> None:
    """Write the Markdown and the rows into the folder of results, and the text between a page's marks."""
    publish(args.out, f"{name}-{args.model}", text, rows)
    if args.page:
        renew(Path(args.page), (f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"), title, text)
