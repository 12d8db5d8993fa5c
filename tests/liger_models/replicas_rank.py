"""One rank of test_replicas.py: save a model that every process holds in full, as under DDP."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.checkpoints import atomic

ROUNDS = 2


def make_model() -> Any:
    torch.manual_seed(0)
    return liger_models.from_config(find_architecture("llama").tiny, device="cpu")


def results(folder: Path, rank: int, ranks: int) -> None:
    model, rename = DistributedDataParallel(make_model()).module, os.rename

    def rename_later(*names: Any) -> None:
        time.sleep(0.5)  # so that other writers have found no folder yet
        rename(*names)

    atomic.os.rename = rename_later
    for number in range(ROUNDS):
        dist.barrier()
        model.save_pretrained(folder / "new" / str(number))
        model.save_pretrained(folder / "again")
    model.save_pretrained(folder / f"own{rank}")
    if rank == 0:  # without waiting for the others
        model.save_pretrained(folder / "first")
    atomic.os.rename = rename
