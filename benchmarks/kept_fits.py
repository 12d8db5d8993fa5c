"""A whole model in quantised bits, trained with adapters under a cap on the GPU's memory, with its plan.

The bits are random and made on the device (`random_bits.py`), so no checkpoint is written.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.random_bits import dense_skeleton, fill, skeleton
from liger_models.layers.memory import Step, StepMemory, largest
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.optim import AdamW
from liger_models.optim.host_state import lane_bytes
from liger_models.training.adapters.lora_settings import LoraSettings
from liger_models.training.lora import Adapters

STATE_BYTES = 8  # AdamW's moments of float32 adapters, per element


def fitting(
    config: dict[str, Any], args: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the plan, the weights and the steps of a model at each level of activation memory, over each
    base.
    """
    for base in args.bases:
        yield from _fitting(config, args, device, base)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _fitting(
    config: dict[str, Any], args: argparse.Namespace, device: torch.device, base: str
) -> Iterator[dict[str, Any]]:
    model = _skeleton(config, args, base)
    on_host = args.optimizer_memory == "host"
    step = Step(
        args.batch,
        args.seq,
        STATE_BYTES,
        lora_rank=args.rank,
        lora_experts=args.experts,
        optimizer_on_host=on_host,
        optimizer_work=lane_bytes(STATE_BYTES) if on_host else 0,
    )
    memory = StepMemory(_adapted(_skeleton(config, args, base), args), step)
    plans, lengths = {}, {}
    for level in args.levels:
        lengths[level] = args.seq or longest(memory, level, args)
        plans[level] = memory.resized(args.batch, lengths[level]).plan([level] * len(model.layers))
    cap(args, device)
    began = time.perf_counter()
    fill(model, device)
    _adapted(model, args)
    trained = [p for p in model.parameters() if p.requires_grad]
    yield row(
        f"the model with its adapters, {base}",
        time.perf_counter() - began,
        allocated(device),
        f"rank {args.rank}",
    )
    optimizer = AdamW(trained, lr=1e-4, state_device="cpu" if on_host else None)

    def take(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    for level in args.levels:
        model.set_activation_memory(level)
        planned, seq = plans[level].peak / 2**30, lengths[level]
        ids = torch.randint(model.spec.vocab_size, (args.batch, seq), device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds = []
            for _ in range(1 + args.steps):
                began = time.perf_counter()
                loss = take(ids)
                wait(device)
                seconds.append(time.perf_counter() - began)
        except torch.OutOfMemoryError as error:
            optimizer.zero_grad(set_to_none=True)
            yield row(
                f"a step of {seq}, {level}, {base}", 0.0, 0.0, f"plan {planned:.2f} GiB; {str(error)[:160]}"
            )
            continue
        peak, reserved = 0.0, 0.0
        if device.type == "cuda":
            peak, reserved = (
                most() / 2**30 for most in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
        timed = sorted(seconds[1:]) or seconds
        median = timed[len(timed) // 2]
        note = (
            f"plan {planned:.2f} GiB ({planned / peak - 1:+.1%}), " if peak else f"plan {planned:.2f} GiB, "
        )
        note += f"reserved {reserved:.2f}, {args.batch * seq / median:.0f} tokens/s, "
        yield row(f"a step of {seq}, {level}, {base}", median, peak, f"{note}loss {loss.item():.4f}")


def _skeleton(config: dict[str, Any], args: argparse.Namespace, base: str) -> LigerCausalLM:
    model = dense_skeleton(config) if base == "dense" else skeleton(config, args.form)
    return model.requires_grad_(False)


def _adapted(model: LigerCausalLM, args: argparse.Namespace) -> LigerCausalLM:
    """The same model with adapters on its layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Adapters(model, LoraSettings(r=args.rank, experts=args.experts), "random", seed=0)
    return model


def longest(memory: StepMemory, level: str, args: argparse.Namespace) -> int:
    """The longest rows that the plan has for 0.95 of the cap."""
    if not args.cap:
        sys.exit("--seq max needs --cap")
    levels, budget = [level] * len(memory.model.layers), int(0.95 * args.cap * 2**30)
    return largest(lambda n: memory.resized(args.batch, n).plan(levels, budget).fits)


def cap(args: argparse.Namespace, device: torch.device) -> None:
    """Let torch allocate no more than `args.cap` GiB."""
    if args.cap and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap * 2**30 / total))


def row(what: str, seconds: float, gib: float, note: str = "") -> dict[str, Any]:
    return {"what": what, "seconds": seconds, "GiB": gib, "note": note}


def allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
