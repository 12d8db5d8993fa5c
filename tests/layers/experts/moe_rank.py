"""One rank of test_moe_robustness.py: forward and backward of a mixture of experts over a batch of its own.

The folder has task.pt. The results are the gradients, averaged over the ranks. The wrapper is ddp or fsdp.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.layers.experts.moe import MixtureOfExperts


def results(folder: Path, rank: int, ranks: int, wrapper: str) -> dict[str, torch.Tensor]:
    task = torch.load(folder / "task.pt", weights_only=False)
    layer = MixtureOfExperts(task["batches"][0].shape[1], task["spec"])
    layer.load_state_dict(task["state"])
    parallel: nn.Module = (
        DistributedDataParallel(layer)
        if wrapper == "ddp"
        else fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    )
    parallel(task["batches"][rank]).square().sum().backward()
    return {
        name: p.grad if wrapper == "ddp" else p.grad.full_tensor() for name, p in layer.named_parameters()
    }
