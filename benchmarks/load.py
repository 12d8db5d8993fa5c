"""Loading a checkpoint from disk: seconds, and peak memory over the bytes of the parameters.

A random sharded LLaMA checkpoint is written to a temporary folder. Every load runs in its own process; the
files are in the page cache. The timed call starts after importing the library and the model's class, and
lasts until every page of every parameter has been touched, since a mapped parameter has not been read yet.
Then every page is written once, as an optimizer will do: parameters that share pages with the file get their
own memory at this point. The whole process is timed from Python's start to its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import machine, markdown_table, publish

SUMMARY = "loading a checkpoint against transformers: seconds and peak memory, on the CPU"
PROVIDERS = ("ours", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", action="append", choices=PROVIDERS, help="repeatable; default: both")
    parser.add_argument("--layers", type=int, default=9, help="decoder layers; each is 94 MB (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="loads per provider (%(default)s)")


def run(args: argparse.Namespace) -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = _write_checkpoint(Path(folder), args.layers)
        for provider in args.provider or PROVIDERS:
            loads = [_load_in_own_process(provider, folder) for _ in range(args.repeats)]
            if failed := [load["note"] for load in loads if "note" in load]:
                rows.append({"provider": provider, "note": failed[0]})
                continue
            seconds = [load["seconds"] for load in loads]
            rows.append(
                {
                    "provider": provider,
                    "seconds": statistics.median(seconds),
                    "seconds_low": min(seconds),
                    "seconds_high": max(seconds),
                    "written_seconds": statistics.median(load["written_seconds"] for load in loads),
                    "process_seconds": statistics.median(load["process_seconds"] for load in loads),
                    "peak_over_parameters": statistics.median(load["peak_bytes"] for load in loads)
                    / num_bytes,
                }
            )
    header = [
        "provider",
        "whole process, s",
        "the call alone, s (spread)",
        "and every page written, s",
        "peak memory / parameters",
    ]
    lines = []
    for row in rows:
        values = [row.get("note", ""), "", "", ""]
        if "seconds" in row:
            spread = f"{row['seconds_low']:.2f} to {row['seconds_high']:.2f}"
            values = [
                f"{row['process_seconds']:.2f}",
                f"{row['seconds']:.2f} ({spread})",
                f"{row['written_seconds']:.2f}",
                f"{row['peak_over_parameters']:.2f}",
            ]
        lines.append([row["provider"], *values])
    title = machine(torch.device("cpu"), "transformers")
    about = f"{title}. {num_bytes / 1e9:.2f} GB of bfloat16 parameters in shards."
    publish(args.out, "load", f"{about}\n\n{markdown_table(header, lines)}", rows)
    return 1 if any("note" in row for row in rows if row["provider"] == "ours") else 0


def _write_checkpoint(folder: Path, num_layers: int) -> int:
    """Write a LLaMA checkpoint of random bfloat16 numbers in shards of at most 500 MB; returns the
    parameters' bytes.
    """
    from safetensors.torch import save_file

    hidden, intermediate, vocab, kv_width = 2048, 5632, 32000, 1024
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": kv_width // 128,
        "head_dim": 128,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}

    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if filled + size > 500e6:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    weight_map = {}
    for n, names in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.02) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _load_in_own_process(provider: str, folder: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.load", provider, folder]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    process_seconds = time.perf_counter() - start
    if done.returncode == 0:
        return {**json.loads(done.stdout.splitlines()[-1]), "process_seconds": process_seconds}
    return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"}


def _load(provider: str, folder: str) -> dict[str, float]:
    """Runs in its own process."""
    if provider == "ours":
        from liger_models import from_hub as load
    else:
        from transformers import AutoModelForCausalLM
        from transformers.models.llama import modeling_llama  # noqa: F401 - not to be counted as loading

        load = AutoModelForCausalLM.from_pretrained
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    model = load(folder, dtype=torch.bfloat16)
    touched = sum(float(p.detach().view(-1)[::2048].sum()) for p in model.parameters())
    seconds = time.perf_counter() - start
    if touched == 0:
        raise RuntimeError("the parameters are zeros: nothing was loaded")
    peak_bytes = _resident_bytes("VmHWM") - before
    start = time.perf_counter()
    for parameter in model.parameters():
        parameter.detach().view(-1)[::2048].zero_()
    written = seconds + time.perf_counter() - start
    return {"seconds": seconds, "written_seconds": written, "peak_bytes": peak_bytes}


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; this measurement needs Linux")


if __name__ == "__main__":
    print(json.dumps(_load(*sys.argv[1:])))
