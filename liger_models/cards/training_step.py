"""The line of a card that needs a GPU: a training step of real widths beside transformers, and transformers
with liger-kernel, as `python -m benchmarks train` measures it.
"""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models.cards.published import FOLDER, published, with_layers
from liger_models.cards.workshop import NotRun, Workshop

PROVIDERS = {"ours": "lean", "transformers+liger": "none", "transformers": "none"}  # with what they keep
BATCH, TOKENS = 2, 4096
# Weights, gradients and both moments in bfloat16; logits of a peer in bfloat16 and twice in float32.
BYTES_OF_A_PARAMETER, BYTES_OF_A_LOGIT = 8, 10
SHARE = 0.5  # of the memory for these; the rest is for activations


def run(shop: Workshop) -> tuple[bool, Mapping[str, Any]]:
    if not torch.cuda.is_available():
        raise NotRun("needs a GPU")
    if not (shop.repository / "benchmarks" / "train.py").is_file():
        raise NotRun("needs a checkout, where the benchmarks are")
    known = published(shop.architecture, shop.repository)
    if not known:
        raise NotRun(f"needs a published config of the family in {FOLDER}")
    smallest = known[0]
    layers = layers_that_fit(smallest.config, torch.cuda.get_device_properties(0).total_memory)
    tokens = min(TOKENS, smallest.config.get("max_position_embeddings") or TOKENS)
    return measure(shop, FOLDER / f"{smallest.name}.json", layers, ["--seq", str(tokens)])


def measure(
    shop: Workshop, config: Path, layers: int, options: Sequence[str]
) -> tuple[bool, Mapping[str, Any]]:
    """Of a model cut to its first layers; the config's path may be relative to the checkout."""
    arguments = ["--model", str(config), "--layers", str(layers), *options]
    for provider, memory in PROVIDERS.items():
        arguments += ["--configuration", f"{provider}:{memory}:{BATCH}"]
    out = shop.folder / "training-step"
    environment = os.environ | {"PYTHONPATH": str(shop.repository)}
    command = [sys.executable, "-m", "benchmarks", "train", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=shop.repository, env=environment, capture_output=True, text=True)
    rows = _rows(out)
    if not rows:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the benchmark said nothing"])[-1])
    providers = {row["provider"]: _result(row) for row in rows}
    return "tokens_per_second" in providers["ours"], {
        "model": config.stem,
        "layers": layers,
        "batch": BATCH,
        "tokens": int(rows[0]["seq"]),
        "command": shlex.join(["python", "-m", "benchmarks", "train", *arguments]),
        "providers": providers,
    }


def layers_that_fit(config: Mapping[str, Any], memory: int) -> int:
    """As many of a model's layers as a GPU with `memory` bytes trains without trouble, at least one."""
    layers = config["num_hidden_layers"]
    logits = BYTES_OF_A_LOGIT * BATCH * TOKENS * config["vocab_size"]
    while layers > 1:
        count = liger_models.from_config(with_layers(config, layers), device="meta").num_parameters()
        if BYTES_OF_A_PARAMETER * count + logits <= SHARE * memory:
            break
        layers -= max(1, layers // 8)
    return layers


def _rows(out: Path) -> list[dict[str, str]]:
    rows = []
    for path in out.glob("*.csv"):
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def _result(row: Mapping[str, str]) -> dict[str, Any]:
    if not row.get("tokens_per_second"):
        return {"note": row.get("note") or "no result"}
    gib = float(row["peak_gib"]) if row["peak_gib"] else None
    return {"tokens_per_second": float(row["tokens_per_second"]), "gib": gib}


def say(found: Mapping[str, Any]) -> str:
    parts = [f"{provider}: {_say_result(result)}" for provider, result in found["providers"].items()]
    shape = f"{found['model']}, {found['layers']} layers, {found['batch']} x {found['tokens']} tokens"
    return f"{shape}, bfloat16, fused AdamW: {'; '.join(parts)}"


def _say_result(result: Mapping[str, Any]) -> str:
    if "note" in result:
        return result["note"]
    memory = "" if result["gib"] is None else f", {result['gib']:.1f} GiB"
    return f"{result['tokens_per_second']:,.0f} tokens/s{memory}"
