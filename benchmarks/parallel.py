"""A training step of a model sharded over several GPUs: tokens per second and GPU, and peak memory, against
transformers and liger-kernel under FSDP2.

Each configuration runs in processes of its own, one per GPU: random weights in bfloat16, random tokens, fused
AdamW in bfloat16. Peers are sharded as usual, every layer and the model, with gradients reduced in float32;
ours by `liger_models.parallelize`. `alone` is an unsharded model on each GPU without communication. Times are
the slowest GPU's, peaks the largest. A peer is measured again in processes that never import anything of
ours.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.divided import divide_peer
from benchmarks.ranks import be_a_rank, result, started, write
from benchmarks.report import machine, markdown_table, publish
from benchmarks.training import step
from benchmarks.training.check import compare
from benchmarks.training.peer import fused_adamw, in_one_line, summary, time_steps
from benchmarks.training.shapes import MODELS, config_of
from benchmarks.training.step import Job, Result, check_provider
from liger_models.architectures import find_architecture
from liger_models.training.observing.profiling import table

SUMMARY = "a training step of a model sharded over several GPUs, against transformers and liger-kernel"
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
    "planned GiB",
    "ms a step",
)
ADAMW_BYTES = 4  # of state: two moments in bfloat16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="use only this many of the model's layers")
    parser.add_argument(
        "--configuration",
        action="append",
        type=configuration,
        metavar="PROVIDER:MEMORY:BATCH[:SHARING]",
        help="repeatable; PROVIDER, MEMORY and BATCH (per GPU) as in `train`, MEMORY for ours also auto, or "
        "auto=100: within so many GiB. SHARING: shard, once (shard, with layers gathered once a step), "
        "alone, or sizes of ParallelDims such as data_replicate=2 or sequence=2,experts=2. "
        f"Default: {' '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--seq", type=int, default=8192, help="tokens per sequence (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the timed ones (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (%(default)s)")
    parser.add_argument(
        "--balanced",
        action="store_true",
        help="ours: give every token random experts, so that ranks that share experts have equal work",
    )
    parser.add_argument("--profile", action="store_true", help="also profile a step's kernels by purpose")
    gpus = torch.cuda.device_count()
    parser.add_argument("--processes", type=int, default=gpus or 2, help="one per GPU (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=900, help="time limit in seconds (%(default)s)")


def run(args: argparse.Namespace) -> int:
    asked = args.configuration or map(configuration, CONFIGURATIONS)
    options = {"seq": args.seq, "warmup": args.warmup, "steps": args.steps}
    options |= {"profile": args.profile, "balanced": args.balanced}
    jobs, config = [chosen | options for chosen in asked], config_of(args.model, args.layers, args.seq)
    rows, end = [], time.monotonic() + args.time_limit
    for row in measure_all(jobs, config, args.processes, args.time_limit):
        rows.append(row)
        _write(args, rows, show=False)
    _write(args, rows, True, *check_divided(rows, args.model, config, args.processes, end))
    return int(any(_is_ours(row) and "tokens_per_second" not in row for row in rows))


def _is_ours(row: Mapping[str, Any]) -> bool:
    return row["provider"].partition("+")[0] == "ours"


def _write(args: argparse.Namespace, rows: Sequence[dict[str, Any]], show: bool, *checks: str) -> None:
    """Write the report so far."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine(device, "transformers", "liger-kernel")
    depth = f"{args.model}" + (f" ({args.layers} layers)" if args.layers else "")
    about += f". {args.processes} processes, {depth}, bfloat16, {args.seq} tokens; median of {args.steps}."
    parts = [about, markdown_table(HEADER, [cells(row, args.processes) for row in rows]), *checks]
    for row in rows:
        if row.get("kernels"):
            parts.append(f"{row['provider']} {row['memory']} {row['sharing']}:\n\n{table(row['kernels'])}")
    records = [{name: value for name, value in row.items() if name != "kernels"} for row in rows]
    publish(args.out, f"parallel-{args.model}", "\n\n".join(parts), records, show)


def configuration(text: str) -> dict[str, Any]:
    """Parse PROVIDER:MEMORY:BATCH[:SHARING]."""
    match = re.fullmatch(r"([a-z_+]+):([a-z,=0-9]+):(\d+)(?::([a-z_,=0-9]+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}; expected for instance ours:lean:2:shard")
    check_provider(match[1])
    return {"provider": match[1], "memory": match[2], "batch": int(match[3]), "sharing": match[4] or "shard"}


def cells(row: dict[str, Any], processes: int) -> list[str]:
    """Cells of a table with `HEADER`."""
    gpus = "1" if row["sharing"] == "alone" else f"{processes}"
    gpus += "" if row["sharing"] in ("alone", "shard") else f" ({row['sharing']})"
    first = [f"{row['batch']} x {row['seq']}", row["provider"], gpus]
    if "tokens_per_second" not in row:
        return [*first, row["memory"], row["note"], "", "", ""]
    peak, planned = (
        "-" if row.get(name) is None else f"{row[name]:.1f}" for name in ("peak_gib", "planned_gib")
    )
    spread = f"{row['step_ms']:.0f} ({row['step_ms_low']:.0f} to {row['step_ms_high']:.0f})"
    return [*first, row["levels"], f"{row['tokens_per_second']:,.0f}", peak, planned, spread]


def measure_all(
    jobs: Sequence[dict[str, Any]], config: Mapping[str, Any], processes: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield each job with its result when ready, measured in processes of its own. Failures, and jobs not
    finished within the time limit, get a note.
    """
    end = time.monotonic() + seconds
    for job in jobs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            task = {"job": job, "config": config}
            with started("benchmarks.parallel", task, folder, processes) as ranks:
                yield job | result(folder / "0.json", ranks, end)


def check_divided(
    rows: Sequence[dict[str, Any]], model: str, config: Mapping[str, Any], processes: int, end: float
) -> list[str]:
    """Return a sentence comparing the first peer with its time in processes that never import this package.
    Empty if no peer was measured.
    """
    row = next((row for row in rows if not _is_ours(row) and "step_ms" in row), None)
    if row is None:
        return []
    sizes = {name: row[name] for name in ("provider", "memory", "batch", "seq", "warmup", "steps")}
    job = Job(model, config, **sizes)
    task = {
        "config": dict(config),
        "reference": find_architecture(config["model_type"]).reference,
        "options": sorted(job.options),
        "memory": job.memory,
        "alone": row["sharing"] == "alone",
        "tokens": step.count_job_tokens(job),
        "warmup": job.warmup,
        "steps": job.steps,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(step.make_job_batch(job, torch.device("cpu")), folder / "batch.pt")
        with started("benchmarks.peers.divided", task, folder, processes) as ranks:
            alone = result(folder / "0.json", ranks, end)
    name = f"{model}, {job.provider} {job.memory}, {job.batch} x {job.seq} on each of {processes}"
    return [compare(name, row["step_ms"], alone)]


# ------------------------------------------------------------------------------------------- in each process


def _main(task: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    options = task["job"]
    sharing, balanced = options.pop("sharing"), options.pop("balanced", False)
    job = Job("", task["config"], **options)
    try:
        found = _measure(job, sharing, balanced, device)
    except NotImplementedError as lacking:  # of all processes
        found = {"note": in_one_line(lacking)}
    of_all: list[Any] = [None] * ranks
    dist.all_gather_object(of_all, found)
    slowest = max(of_all, key=lambda found: found.get("step_ms", 0))
    slowest["peak_gib"] = max((found.get("peak_gib") or 0 for found in of_all), default=0) or None
    if rank == 0:
        print(job.provider, job.memory, f"{job.batch} x {job.seq}", sharing, slowest, flush=True)
        write(folder / "0.json", slowest)


def _measure(job: Job, sharing: str, balanced: bool, device: torch.device) -> Result:
    """Measure a job in this process.

    Raises:
        NotImplementedError: the provider does not support the model.
    """
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    model = _build(job, sharing, device)
    optimizer = fused_adamw(model, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    batch = step.make_job_batch(job, device)
    if balanced and job.ours:
        batch["routed_experts"] = _random_experts(model, job, device)
    times, losses = time_steps(model, optimizer, batch, job.warmup, job.steps, device)
    rate = summary(times, step.count_job_tokens(job))
    # Processes of one sequence receive the same rows.
    rate["tokens_per_second"] /= _sizes(sharing).get("sequence", 1)
    result = {
        **rate,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "planned_gib": _planned(model, job, sharing) if job.ours else None,
        "levels": _levels(model, job),
        "loss": losses[-1].item(),
        **({"kernels": step.kernels(job, model, optimizer, device)} if job.profile else {}),
    }
    del model, optimizer
    step.free(device)
    return result


def _build(job: Job, sharing: str, device: torch.device) -> Any:
    import liger_models

    if job.ours:
        dims = liger_models.ParallelDims(**_sizes(sharing))
        divide = functools.partial(
            liger_models.parallelize, mesh=dims, reshard_after_forward=sharing != "once"
        )
        auto, gib = job.memory.startswith("auto"), job.memory.partition("=")[2]
        model = liger_models.from_config(
            job.config,
            dtype=torch.bfloat16,
            device=device,
            activation_memory="lean" if auto else step.levels(job.memory, job.config["num_hidden_layers"]),
            shard=None if sharing == "alone" else divide,
            float8=job.float8,
        )
        if auto:
            model.set_activation_memory("auto", f"{gib}GiB" if gib else None, ADAMW_BYTES, print)
        return model
    model = step.build(job, job.config, device)
    return model if sharing == "alone" else divide_peer(model, device)


def _random_experts(model: Any, job: Job, device: torch.device) -> torch.Tensor:
    """[batch, seq, layers with experts, top_k], evenly distributed."""
    specs = [m.spec for m in model.layers.modules() if hasattr(m, "exchange")]
    draw = torch.Generator(device).manual_seed(0)
    shape = job.batch, job.seq
    chosen = [
        torch.rand(*shape, spec.num_experts, generator=draw, device=device).topk(spec.experts_per_token)
        for spec in specs
    ]
    return torch.stack([found.indices.int() for found in chosen], dim=2)


def _sizes(sharing: str) -> dict[str, int]:
    pairs = (pair.split("=") for pair in sharing.split(",") if "=" in pair)
    return {name: int(size) for name, size in pairs}


def _planned(model: Any, job: Job, sharing: str) -> float:
    """Planned peak in GiB."""
    from liger_models.layers.memory import Step, StepMemory

    ranks = _sizes(sharing).get("sequence", 1)
    state = ADAMW_BYTES if job.warmup + job.steps > 1 else 0  # the first step ends by creating it
    plan = StepMemory(model, Step(job.batch, job.seq, state, sequence_ranks=ranks))
    return plan.plan(model.activation_memory).peak / 2**30


def _levels(model: Any, job: Job) -> str:
    """Levels in words: 'lean', or '28 lean, 4 checkpoint'."""
    if not job.ours:
        return job.memory
    counts = {level: model.activation_memory.count(level) for level in dict.fromkeys(model.activation_memory)}
    return (
        next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {level}" for level, n in counts.items())
    )


if __name__ == "__main__":
    be_a_rank(_main)
