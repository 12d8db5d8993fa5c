"""One rank of test_moe_robustness.py: forward and backward of a mixture of experts over a batch of its own.

Run as `python moe_rank.py FOLDER WRAPPER`, with task.pt in the folder; writes the gradients, averaged over
the ranks, as rank0.pt or rank1.pt. WRAPPER is ddp or fsdp.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.layers.moe import MixtureOfExperts


def main(folder: Path, wrapper: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    task = torch.load(folder / "task.pt", weights_only=False)
    layer = MixtureOfExperts(task["batches"][0].shape[1], task["spec"])
    layer.load_state_dict(task["state"])
    parallel: nn.Module = (
        DistributedDataParallel(layer)
        if wrapper == "ddp"
        else fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    )
    parallel(task["batches"][rank]).square().sum().backward()
    gradients = {
        name: p.grad if wrapper == "ddp" else p.grad.full_tensor() for name, p in layer.named_parameters()
    }
    torch.save(gradients, folder / f"rank{rank}.pt")
    del parallel, layer  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
