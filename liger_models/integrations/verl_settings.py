"""Settings of verl's engine of ours (verl.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPEngineConfig

from liger_models.convert.errors import UnsupportedModelError
from liger_models.training.adapters.lora_settings import ALL


@dataclass
class LigerEngineConfig(FSDPEngineConfig):
    """verl's FSDP settings, and ours: name this class as the `_target_` of `fsdp_config` to use them.

    Attributes:
        expert_parallel_size: number of processes that share the experts of a layer.
        activation_memory: what is kept for the backward pass, as for `from_hub`. Default: "checkpoint" with
            verl's `enable_gradient_checkpointing`, else "lean".
    """

    expert_parallel_size: int = 1
    activation_memory: str | None = None


def refuse(model_config: Any, config: Any) -> None:
    """Refuse settings that would change results and are not supported.

    Raises:
        UnsupportedModelError: one is set.
    """
    lora, parallel = model_config.lora_rank > 0, config.ulysses_sequence_parallel_size > 1
    found = {
        "model.mtp.enable_train": model_config.mtp.enable_train,
        "model.exclude_modules": lora and bool(model_config.exclude_modules),
        "model.target_parameters": lora and bool(model_config.target_parameters),
        "model.lora_rank with ulysses_sequence_parallel_size or expert_parallel_size": lora
        and (parallel or getattr(config, "expert_parallel_size", 1) > 1),
        "qat.enable": config.qat.enable,
        "offload_policy": config.offload_policy,
    }
    if taken := [name for name, is_set in found.items() if is_set]:
        raise UnsupportedModelError(f"strategy=liger does not support {taken[0]}; leave it at its default")


def targets_of(modules: str | list[str]) -> str:
    """verl's `target_modules`, as `LoraSettings` takes them."""
    return modules if modules == ALL else "+".join([modules] if isinstance(modules, str) else modules)


def schedule_of(optimizer: torch.optim.Optimizer, config: Any) -> Any:
    """The schedule of the learning rate that verl's settings describe."""
    warmup = config.lr_warmup_steps
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * config.total_training_steps)
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=warmup)
    return get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=config.total_training_steps,
        min_lr_ratio=config.min_lr_ratio,
        num_cycles=config.num_cycles,
        zero_indexed_step=config.zero_indexed_step,
    )
