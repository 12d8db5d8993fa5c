"""One rank of test_info_nce.py: a sharded base model embeds this rank's queries and passages.

The folder has a checkpoint and batch.pt; the result is the gradient of every tensor of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import liger_models
from liger_models.losses import info_nce_loss


def results(folder: Path, rank: int, ranks: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    model = liger_models.from_hub(
        folder / "model",
        dtype=torch.float64,
        shard=lambda model: liger_models.parallelize(model, mesh),
    )
    queries, positives, negatives = torch.load(folder / "batch.pt")[rank]
    embeddings = [model(ids, pooling="last").embeddings for ids in (queries, positives, negatives)]
    # FSDP averages over ranks, so a sum over the step's three queries is divided by 3 / 2.
    info_nce_loss(*embeddings, temperature=0.3, group=dist.group.WORLD, num_items=3 / ranks).backward()
    model.save_pretrained(folder / "saved")
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}
