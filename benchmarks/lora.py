"""A training step with LoRA (PEFT, on all linear layers or on experts) of ours against others.

Every configuration runs in its own process, with random weights in bfloat16, or quantised (QLoRA), and fused
AdamW on the adapters. The models of both sides are transformers' classes, and the adapters PEFT's. A step is
forward, backward, optimizer step and zero_grad; steps are timed by device events without synchronisation
between them.

Batches are described in `benchmarks/training/batches.py`. Tokens per second exclude padding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish
from benchmarks.train import MODELS
from benchmarks.training.batches import DATA, count_tokens, make_batch
from benchmarks.training.peer import summary, time_steps
from liger_models.layers.projections.float8 import RECIPES
from liger_models.models.float8 import set_float8
from liger_models.models.quantization import METHODS, quantise

SUMMARY = "a training step with LoRA against transformers and PEFT, and with liger-kernel"
OURS = ("ours", "ours+kept")  # kept: over the bits of a checkpoint in float8 blocks
PROVIDERS = (
    *(f"{base}{recipe}" for base in OURS for recipe in ("", *(f"+{name}" for name in RECIPES))),
    *("transformers", "transformers+liger"),
)
ADAPTERS = ("float32", "bfloat16")  # float32 is PEFT's choice for a bfloat16 model
CONFIGURATIONS = (
    "ours:float32:mlp=1,lean:4",
    "ours:float32:lean:4",
    "ours:bfloat16:lean:4",
    "transformers+liger:float32:none:4",
    "transformers+liger:bfloat16:none:4",
    "transformers+liger:float32:none:2",
    "transformers+liger:float32:checkpoint:4",
    "ours:float32:checkpoint:4",
    "ours:float32:lean:16:packed",
    "ours:float32:lean:16:padded",
    "transformers+liger:float32:none:16:padded",
    "transformers+liger:bfloat16:none:16:packed",
)
HEADER = ("batch", "data", "provider", "adapters", "activation memory", "tokens/s", "peak GiB", "ms a step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="(%(default)s)")
    parser.add_argument(
        "--configuration",
        action="append",
        metavar="PROVIDER:ADAPTERS:MEMORY:BATCH[:DATA]",
        help=f"repeatable. PROVIDER: {', '.join(PROVIDERS)}. ADAPTERS: {', '.join(ADAPTERS)}. MEMORY: for "
        "ours a level of activation memory, or 'mlp=2,lean' (the first 2 layers mlp); for the others none "
        f"or checkpoint. DATA: {', '.join(DATA)}. Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--rank", type=int, default=16, help="(%(default)s)")
    parser.add_argument(
        "--experts",
        action="store_true",
        help="adapters on attention and on the stacks of all experts (target_parameters), instead of all "
        "linear layers",
    )
    parser.add_argument(
        "--quantize", choices=METHODS, help="quantise the base weights with bitsandbytes (default: no)"
    )
    parser.add_argument("--seq", type=int, default=4096, help="tokens per sequence of `full` (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds per configuration (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    rows = []
    for configuration in args.configuration or CONFIGURATIONS:
        job = _parse(configuration) | {"model": args.model, "rank": args.rank, "seq": args.seq}
        job |= {"quantize": args.quantize, "experts": args.experts}
        job |= {"warmup": args.warmup, "steps": args.steps, "device": args.device}
        rows.append(job | _in_own_process(job, args.time_limit))
        print(configuration, *_cells(rows[-1]), file=sys.stderr, flush=True)
    about = machine(torch.device(args.device), "transformers", "peft", "liger-kernel")
    about += (
        f". {args.model}, {args.quantize or 'bfloat16'}, LoRA of rank {args.rank} on "
        f"{'attention and all experts' if args.experts else 'all linear layers'}; "
        f"median of {args.steps}."
    )
    lines = []
    for row in rows:
        batch = f"{row['batch']} x {args.seq}" if row["data"] == "full" else f"{row['batch']} documents"
        lines.append(
            [batch, row["data"], row["provider"], row["adapters"], row["memory"], *_cells(row)],
        )
    publish(
        args.out,
        f"{'q' if args.quantize else ''}lora-{args.model}{'-experts' if args.experts else ''}",
        f"{about}\n\n{markdown_table(HEADER, lines)}",
        rows,
    )
    return int(any(row["provider"].startswith("ours") and "failed" in row.get("note", "") for row in rows))


def _parse(configuration: str) -> dict[str, Any]:
    provider, adapters, data = ("|".join(map(re.escape, names)) for names in (PROVIDERS, ADAPTERS, DATA))
    pattern = rf"({provider}):({adapters}):([a-z,=0-9]+):(\d+)(?::({data}))?"
    match = re.fullmatch(pattern, configuration)
    if match is None:
        sys.exit(f"cannot read configuration {configuration!r}; expected for instance ours:float32:lean:4")
    names = ("provider", "adapters", "memory", "batch", "data")
    return dict(zip(names, match.groups("full"), strict=True)) | {"batch": int(match[4])}


def _cells(row: dict[str, Any]) -> list[str]:
    if "note" in row:
        return [row["note"], "", ""]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    spread = f"{row['step_ms']:.0f} ({row['step_ms_low']:.0f} to {row['step_ms_high']:.0f})"
    return [f"{row['tokens_per_second']:,.0f}", peak, spread]


def _in_own_process(job: dict[str, Any], time_limit: float) -> dict[str, Any]:
    """The result's fields, or a `note` with the reason why there is none."""
    # Growing segments waste no memory between blocks; for every provider alike.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "benchmarks.lora", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"note": f"stopped after {time_limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-3000:], file=sys.stderr)
    return {"note": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"}


def _train(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in its own process."""
    torch.manual_seed(0)
    device = torch.device(job["device"])
    cuda = device.type == "cuda"
    try:
        model = _adapted(_build(job, device), job)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)
        asked = job["data"], job["batch"], job["seq"], MODELS[job["model"]]
        batch, tokens = make_batch(*asked, device), count_tokens(*asked)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        times, losses = time_steps(model, optimizer, batch, job["warmup"], job["steps"], device)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    return {
        **summary(times, tokens),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "first_loss": losses[0].item(),
        "loss": losses[-1].item(),
        "trained": sum(p.numel() for p in trained),
    }


def _build(job: dict[str, Any], device: torch.device) -> Any:
    import transformers

    config = dict(MODELS[job["model"]])
    model_type = config.pop("model_type")
    library, *options = job["provider"].split("+")
    ours = library == "ours"
    float8: Any = next((option for option in options if option in RECIPES), None)
    if "kept" in options:
        return _over_kept_bits(job, device, float8)
    if ours:
        import liger_models.hf

        liger_models.hf.register(projections="split")
    elif job["provider"].endswith("+liger"):
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{model_type}")()
    hf_config = transformers.AutoConfig.for_model(model_type, **config | {"use_cache": False})
    with device:
        model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).train()
    if job["quantize"]:
        quantise(model, job["quantize"], device)
    if ours:
        model.set_activation_memory(_levels(job["memory"], hf_config.num_hidden_layers))
        set_float8(model, float8)
    elif job["memory"] == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif job["memory"] != "none":
        raise ValueError(f"memory is {job['memory']!r}; {job['provider']} has none and checkpoint")
    return model


def _over_kept_bits(job: dict[str, Any], device: torch.device, float8: Any) -> Any:
    """Our native model over a checkpoint of random weights in float8 blocks, which is written for it."""
    import liger_models

    config = MODELS[job["model"]]
    with tempfile.TemporaryDirectory() as folder:
        fresh = liger_models.from_config(config, dtype=torch.bfloat16, device=device)
        fresh.save_pretrained(folder, quantization="fp8-block")
        del fresh
        torch.cuda.empty_cache()
        return liger_models.from_hub(
            folder,
            dtype=torch.bfloat16,
            device=device,
            projections="split",
            keep_quantised=True,
            float8=float8,
            activation_memory=_levels(job["memory"], config["num_hidden_layers"]),
        ).train()


def _levels(memory: str, num_layers: int) -> list[str]:
    """'lean' for all layers, or 'mlp=2,lean': the first 2 mlp, the others lean."""
    *first, rest = memory.split(",")
    levels = [level for part in first for level in [part.split("=")[0]] * int(part.split("=")[1])]
    return levels + [rest] * (num_layers - len(levels))


def _adapted(model: Any, job: dict[str, Any]) -> Any:
    import peft

    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if "kept" in job["provider"]:  # a native model, in which PEFT would count the head
        targets["exclude_modules"] = ["lm_head"]
    if job["experts"]:
        targets = {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }
    config = peft.LoraConfig(r=job["rank"], lora_alpha=2 * job["rank"], task_type="CAUSAL_LM", **targets)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=job["adapters"] == "float32")
    if "checkpoint" in job["memory"]:
        adapted.enable_input_require_grads()
    return adapted


if __name__ == "__main__":
    print(json.dumps(_train(json.loads(sys.argv[1]))))
