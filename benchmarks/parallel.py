"""A training step of a model that several GPUs share: tokens a second of each GPU and peak memory, beside
transformers and liger-kernel under FSDP2.

One process a GPU measures all configurations, one after the other: fresh random weights in bfloat16, random
tokens, fused AdamW in bfloat16. The peers are divided as is usual, every layer and the model, with gradients
added up in float32; ours by `liger_models.parallelize`. `alone` is a model whole on each GPU, which knows
nothing of the others. Times are of the slowest GPU, peaks of the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, markdown_table, publish
from benchmarks.training import step
from benchmarks.training.shapes import MODELS, ROOT, config_of
from benchmarks.training.step import Job, Result, check_provider

SUMMARY = "a training step of a model that several GPUs share, beside transformers and liger-kernel"
CONFIGURATIONS = (
    "ours:lean,checkpoint=4:4",
    "transformers+liger:checkpoint:4",
    "ours:lean:2",
    "transformers+liger:none:2",
    "ours:lean:2:alone",
    "ours:auto:4",
)
HEADER = (
    "batch x seq a GPU",
    "provider",
    "GPUs",
    "activation memory",
    "tokens/s a GPU",
    "peak GiB",
    "ms a step",
)
ADAMW_BYTES = 4  # of state: two moments in bfloat16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="of the model's layers only the first so many")
    parser.add_argument(
        "--configuration",
        action="append",
        type=_configuration,
        metavar="PROVIDER:MEMORY:BATCH[:SHARING]",
        help="repeatable; PROVIDER, MEMORY and BATCH (of one GPU) as of `train`, MEMORY for ours also auto. "
        "SHARING: shard, once (shard, and layers are gathered once a step), alone, or sizes of ParallelDims "
        "such as data_replicate=2 or sequence=2,experts=2. "
        f"Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--seq", type=int, default=8192, help="tokens a sequence (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    gpus = torch.cuda.device_count()
    parser.add_argument("--processes", type=int, default=gpus or 2, help="one a GPU (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds for all (%(default)s)")


def run(args: argparse.Namespace) -> int:
    jobs = [
        {**configuration, "seq": args.seq, "warmup": args.warmup, "steps": args.steps}
        for configuration in args.configuration or map(_configuration, CONFIGURATIONS)
    ]
    rows = _measure_all(jobs, args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine(device, "transformers", "liger-kernel")
    about += (
        f". {args.processes} processes, {args.model}, bfloat16, {args.seq} tokens; median of {args.steps}."
    )
    lines = [
        [f"{row['batch']} x {row['seq']}", row["provider"], *_cells(row, args.processes)] for row in rows
    ]
    publish(args.out, f"parallel-{args.model}", f"{about}\n\n{markdown_table(HEADER, lines)}", rows)
    return int(any(row["provider"] == "ours" and "tokens_per_second" not in row for row in rows))


def _configuration(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"([a-z_+]+):([a-z,=0-9]+):(\d+)(?::([a-z_,=0-9]+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; expected for instance ours:lean:2:shard")
    check_provider(match[1])
    return {"provider": match[1], "memory": match[2], "batch": int(match[3]), "sharing": match[4] or "shard"}


def _cells(row: dict[str, Any], processes: int) -> list[str]:
    gpus = "1" if row["sharing"] == "alone" else f"{processes}"
    gpus += "" if row["sharing"] in ("alone", "shard") else f" ({row['sharing']})"
    if "tokens_per_second" not in row:
        return [gpus, row["memory"], row.get("note", "not measured"), "", ""]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    spread = f"{row['step_ms']:.0f} ({row['step_ms_low']:.0f} to {row['step_ms_high']:.0f})"
    return [gpus, row["levels"], f"{row['tokens_per_second']:,.0f}", peak, spread]


def _measure_all(jobs: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each job with its result; those after a failure have none."""
    task = {"jobs": jobs, "config": config_of(args.model, args.layers)}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        # Growing segments waste no memory between blocks; for every provider alike.
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        environment |= {"WORLD_SIZE": str(args.processes)}
        command = [sys.executable, "-m", "benchmarks.parallel", json.dumps(task), folder]
        processes = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=sys.stderr, cwd=ROOT)
            for rank in range(args.processes)
        ]
        try:
            end = time.monotonic() + args.time_limit
            while time.monotonic() < end and {process.poll() for process in processes} == {None}:
                time.sleep(0.2)
            for process in processes:  # the others wait for one that failed, and need not
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
        finally:
            for process in processes:
                process.kill()
        found = [json.loads(line) for line in results.read_text().splitlines()]
    return [job | result for job, result in itertools.zip_longest(jobs, found, fillvalue={})]


# ------------------------------------------------------------------------------------------- in each process


def _main(task: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    for options in task["jobs"]:
        sharing = options.pop("sharing")
        job = Job("", task["config"], **options)
        try:
            result = _measure(job, sharing, device)
        except NotImplementedError as lacking:  # of all processes
            result = {"note": step.in_one_line(lacking)}
        of_all: list[Any] = [None] * ranks
        dist.all_gather_object(of_all, result)
        slowest = max(of_all, key=lambda found: found.get("step_ms", 0))
        slowest["peak_gib"] = max((found.get("peak_gib") or 0 for found in of_all), default=0) or None
        if rank == 0:
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(slowest) + "\n")
            print(job.provider, job.memory, f"{job.batch} x {job.seq}", sharing, slowest, flush=True)
    dist.destroy_process_group()


def _measure(job: Job, sharing: str, device: torch.device) -> Result:
    """
    Raises:
        NotImplementedError: the provider does not have the model.
    """
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    model = _build(job, sharing, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times, losses = step.time_steps(job, model, optimizer, device)
    rate = step.summary(job, times)
    # Those that have one sequence together were given the same rows.
    rate["tokens_per_second"] /= _sizes(sharing).get("sequence", 1)
    result = {
        **rate,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "levels": _levels(model, job),
        "loss": losses[-1].item(),
    }
    del model, optimizer
    step.free(device)
    return result


def _build(job: Job, sharing: str, device: torch.device) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import liger_models

    if job.ours:
        dims = liger_models.ParallelDims(**_sizes(sharing))
        divide = functools.partial(
            liger_models.parallelize, mesh=dims, reshard_after_forward=sharing != "once"
        )
        auto = job.memory == "auto"
        model = liger_models.from_config(
            job.config,
            dtype=torch.bfloat16,
            device=device,
            activation_memory="lean" if auto else step.levels(job.memory, job.config["num_hidden_layers"]),
            shard=None if sharing == "alone" else divide,
        )
        if auto:
            model.set_activation_memory("auto", None, ADAMW_BYTES, print)
        return model
    model = step.build(job, job.config, device)
    if sharing != "alone":
        mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def _sizes(sharing: str) -> dict[str, int]:
    pairs = (pair.split("=") for pair in sharing.split(",") if "=" in pair)
    return {name: int(size) for name, size in pairs}


def _levels(model: Any, job: Job) -> str:
    """What is kept, in words: 'lean', or '28 lean, 4 checkpoint'."""
    if not job.ours:
        return job.memory
    counts = {level: model.activation_memory.count(level) for level in dict.fromkeys(model.activation_memory)}
    return (
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {level}" for level, n in counts.items())
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
