"""Checkpoints of verl's engine of ours (verl.py), through torch.distributed.checkpoint.

state/           model and optimizer, for any number of processes; with adapters, only these
extra_RANK.pt    random state and learning rate schedule of a process
huggingface/     on request, the model, or its adapters in PEFT's files, for other programs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def save(engine: Any, folder: Path, most: int | None) -> None:
    """Write a checkpoint of a LigerEngine; verl keeps the latest `most`. All processes call this."""
    manager = engine.checkpoints
    if dist.get_rank() == 0:
        manager.ensure_checkpoint_capacity(most)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _state(engine, manager.should_save_model, manager.should_save_optimizer)
    dcp.save(state, checkpoint_id=folder / "state")
    if manager.should_save_extra:
        extra = {"rng": torch.get_rng_state()}
        if engine.device.type == "cuda":
            extra["cuda"] = torch.cuda.get_rng_state()
        if engine.lr_scheduler is not None:
            extra["lr_scheduler"] = engine.lr_scheduler.state_dict()
        torch.save(extra, folder / f"extra_{dist.get_rank()}.pt")
    if manager.should_save_hf_model and engine.adapters is None:
        engine.module.save_pretrained(folder / "huggingface")
    elif manager.should_save_hf_model and dist.get_rank() == 0:
        (folder / "huggingface").mkdir(exist_ok=True)
        engine.adapters.write(folder / "huggingface")
    dist.barrier()
    if dist.get_rank() == 0:
        manager.register_checkpoint(str(folder), most)


def load(engine: Any, folder: Path) -> None:
    """Read a checkpoint into a LigerEngine. All processes call this."""
    manager = engine.checkpoints
    state = _state(engine, manager.should_load_model, manager.should_load_optimizer)
    dcp.load(state, checkpoint_id=folder / "state")
    set_state_dict(
        engine.module,
        engine.optimizer if "optimizer" in state else (),
        model_state_dict=state.get("model", {}),
        optim_state_dict=state.get("optimizer", {}),
        options=_options(engine),
    )
    own = folder / f"extra_{dist.get_rank()}.pt"
    if manager.should_load_extra and own.exists():  # not of a process that was not there
        extra = torch.load(own, weights_only=True)
        torch.set_rng_state(extra["rng"])
        if "cuda" in extra and engine.device.type == "cuda":
            torch.cuda.set_rng_state(extra["cuda"])
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(extra["lr_scheduler"])
    dist.barrier()


def _state(engine: Any, model: bool, optimizer: bool) -> dict[str, Any]:
    optimizers = engine.optimizer if optimizer and engine.optimizer is not None else ()
    found, states = get_state_dict(engine.module, optimizers, options=_options(engine))
    return ({"model": found} if model else {}) | ({"optimizer": states} if optimizers else {})


def _options(engine: Any) -> StateDictOptions:
    frozen = engine.adapters is not None
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)
