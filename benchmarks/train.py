"""A training step of a model's shape: tokens a second and peak memory, beside transformers and liger-kernel.

Every configuration runs in a process of its own, on fresh random weights in bfloat16 and random tokens, with
fused AdamW in bfloat16. A step is forward, backward, optimizer step and zero_grad; steps are timed by device
events with no waiting between them. That memory does not suffice is a result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish

SUMMARY = (
    "a training step beside transformers, and transformers with liger-kernel: tokens a second, peak memory"
)

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _shape(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: Any
) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        **others,
    }


def _of_family(model_type: str, **sizes: Any) -> dict[str, Any]:
    """What is not given is the family's default in transformers, which `_config` writes out."""
    return {"model_type": model_type, **sizes}


# Those of other families have their published widths; "-6" is a number of layers that fits one GPU.
MODELS = {
    "llama-3-8b": _shape(4096, 32, 32, 8, 14336),
    "llama-3.2-1b": _shape(2048, 16, 32, 8, 8192, tie_word_embeddings=True),
    "tiny": _shape(256, 2, 4, 2, 512, vocab_size=1024),
    "qwen3-0.6b": _of_family(
        "qwen3",
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "gemma-2-2b": _of_family(
        "gemma2",
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
    ),
    "qwen3-30b-a3b-6": _of_family(
        "qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "gpt-oss-20b-6": _of_family("gpt_oss", num_hidden_layers=6, num_local_experts=32, hidden_size=2880),
}
PROVIDERS = (
    "ours",
    "ours+split",  # projections by themselves, under the checkpoint's names
    "ours+compile",
    "transformers",
    "transformers+compile",
    "transformers+liger",
)
CONFIGURATIONS = (
    "ours:lean:2",
    "transformers+liger:none:2",
    "transformers:none:2",
    "ours:lean:4",
    "transformers+liger:none:4",
    "ours:checkpoint:8",
    "transformers+liger:checkpoint:8",
    "transformers:checkpoint:8",
    "ours:lean,checkpoint=4:8",
    "transformers+liger:none:8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_model,
        default="llama-3-8b",
        metavar="SHAPE",
        help=f"{', '.join(MODELS)}; or a config.json, or a file {{'config': ...}} (%(default)s)",
    )
    parser.add_argument("--layers", type=int, help="of the model's layers only the first so many")
    parser.add_argument(
        "--configuration",
        action="append",
        metavar="PROVIDER:MEMORY:BATCH",
        help=f"repeatable. PROVIDER: {', '.join(PROVIDERS)}. MEMORY: for ours a level of activation memory, "
        "or 'lean,checkpoint=4' (all lean, the last 4 layers checkpoint); for the others none or checkpoint. "
        f"Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens a sequence (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds for a configuration (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    jobs = [_parse(configuration) for configuration in args.configuration or CONFIGURATIONS]
    rows = []
    for job in jobs:
        job |= {"model": args.model, "layers": args.layers, "seq": args.seq, "device": args.device}
        job |= {"warmup": args.warmup, "steps": args.steps}
        row = job | _in_own_process(job, args.time_limit)
        rows.append(row)
        print(
            f"{row['provider']} {row['memory']} batch {row['batch']}: {_cell(row)}",
            file=sys.stderr,
            flush=True,
        )
    title = machine(torch.device(args.device), "transformers", "liger-kernel")
    header = [
        "batch x seq",
        "provider",
        "activation memory",
        "tokens/s",
        "peak GiB",
        "ms a step (spread)",
        "loss",
    ]
    lines = []
    for row in rows:
        values = [_cell(row), "", "", ""]
        if "tokens_per_second" in row:
            step = f"{row['step_ms']:.0f} ({row['step_ms_low']:.0f} to {row['step_ms_high']:.0f})"
            peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] is not None else "-"
            values = [
                f"{row['tokens_per_second']:,.0f}",
                peak,
                step,
                f"{row['first_loss']:.2f} to {row['loss']:.2f}",
            ]
        lines.append([f"{row['batch']} x {args.seq}", row["provider"], row["memory"], *values])
    name = Path(args.model).stem if args.model not in MODELS else args.model
    cut = f" ({args.layers} layers)" if args.layers else ""
    about = f"{title}. {name}{cut}, bfloat16 weights and fused AdamW; median of {args.steps} steps."
    publish(args.out, f"train-{name}", f"{about}\n\n{markdown_table(header, lines)}", rows)
    failed = [row for row in rows if row.get("note", "").startswith("failed") and _is_ours(row)]
    return 1 if failed else 0


def _model(name: str) -> str:
    if name not in MODELS and not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of {', '.join(MODELS)}")
    return name


def _parse(configuration: str) -> dict[str, Any]:
    match = re.fullmatch(rf"({'|'.join(map(re.escape, PROVIDERS))}):([a-z,=0-9]+):(\d+)", configuration)
    if match is None:
        sys.exit(f"cannot read configuration {configuration!r}; expected for instance ours:lean:2")
    return {"provider": match[1], "memory": match[2], "batch": int(match[3])}


def _is_ours(row: dict[str, Any]) -> bool:
    return row["provider"].partition("+")[0] == "ours"


def _cell(row: dict[str, Any]) -> str:
    if "tokens_per_second" in row:
        peak = f", {row['peak_gib']:.1f} GiB" if row["peak_gib"] is not None else ""
        return f"{row['tokens_per_second']:,.0f} tokens/s{peak}"
    return row["note"]


def _in_own_process(job: dict[str, Any], time_limit: float) -> dict[str, Any]:
    """The result's fields, or a `note` that says why there is none."""
    # Growing segments waste no memory between blocks; for every provider alike.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "benchmarks.train", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"note": f"stopped after {time_limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-3000:], file=sys.stderr)
    return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"}


def _train(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in the process of its own."""
    torch.manual_seed(0)
    device = torch.device(job["device"])
    cuda = device.type == "cuda"
    try:
        model = _build(job, device)
        # One optimizer kernel for all; without it eight gigabytes of temporaries would be measured.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
        vocab, shape = _config(job)["vocab_size"], (job["batch"], job["seq"])
        batches = torch.randint(vocab, (job["warmup"] + job["steps"], *shape), device=device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        losses, marks = [], [_mark(cuda)]
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            marks.append(_mark(cuda))
        if cuda:
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    except NotImplementedError as lacking:
        return {"note": str(lacking)}
    steps = [_milliseconds(a, b) for a, b in itertools.pairwise(marks)][job["warmup"] :]
    step = statistics.median(steps)
    return {
        "tokens_per_second": 1e3 * job["batch"] * job["seq"] / step,
        "step_ms": step,
        "step_ms_low": min(steps),
        "step_ms_high": max(steps),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "first_loss": losses[0].item(),
        "loss": losses[-1].item(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _build(job: dict[str, Any], device: torch.device) -> torch.nn.Module:
    config = _config(job)
    library, _, variant = job["provider"].partition("+")
    if library == "ours":
        import liger_models

        model: Any = liger_models.from_config(
            config,
            dtype=torch.bfloat16,
            device=device,
            activation_memory=_levels(job["memory"], config["num_hidden_layers"]),
            projections="split" if variant == "split" else "fused",
        )
        return torch.compile(model) if variant == "compile" else model

    import transformers

    model_type = config.pop("model_type")
    if variant == "liger":
        import liger_kernel.transformers as liger

        apply = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
        if apply is None:
            raise NotImplementedError(f"liger-kernel does not have {model_type}")
        apply()
    hf_config = transformers.AutoConfig.for_model(model_type, **config | {"use_cache": False})
    with device:
        # With the attention that transformers chooses for the family.
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    if job["memory"] == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif job["memory"] != "none":
        raise ValueError(f"memory is {job['memory']!r}; {job['provider']} has none and checkpoint")
    return torch.compile(model.train()) if variant == "compile" else model.train()


def _config(job: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json, whole, or with the first of its layers alone."""
    from liger_models.cards.published import read_config, with_layers

    name = job["model"]
    config = dict(MODELS[name]) if name in MODELS else dict(read_config(Path(name)))
    config = with_layers(config, job["layers"]) if job["layers"] else config
    if "vocab_size" in config:
        return config
    from transformers import AutoConfig

    whole = AutoConfig.for_model(config.pop("model_type"), **config).to_dict()
    return {key: value for key, value in whole.items() if value is not None}


def _levels(memory: str, num_layers: int) -> str | list[str]:
    """'lean' for all layers, or 'lean,checkpoint=4': all lean but the last 4, which are checkpointed."""
    if "," not in memory:
        return memory
    level, (other, count) = memory.split(",")[0], memory.split(",")[1].split("=")
    return [level] * (num_layers - int(count)) + [other] * int(count)


def _mark(cuda: bool):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start, end) -> float:
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)


if __name__ == "__main__":
    print(json.dumps(_train(json.loads(sys.argv[1]))))
