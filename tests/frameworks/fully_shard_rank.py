"""One rank of test_fully_shard.py: forward and backward over its share of a batch under FSDP2.

Run as `python fully_shard_rank.py FOLDER DEVICE`, with task.pt in the folder; writes rank0.pt, rank1.pt, ...
there: the loss and the gradients by level of activation memory and dtype of the parameters.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_models


def main(folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    meeting = (folder / "meeting").as_uri()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh(device, (ranks,))
    task = torch.load(folder / "task.pt", weights_only=False)
    own = {name: value.chunk(ranks)[rank].to(device) for name, value in task["batch"].items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for level, dtype in task["cases"]:
        model = liger_models.from_config(task["config"], activation_memory=level)
        model.load_state_dict(task["state"])
        model.to(device=device, dtype=dtype)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
        loss = model(**own, num_items_in_batch=task["num_items"]).loss
        loss.backward()
        gradients = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
        results[level, dtype] = {"loss": loss.detach().cpu(), "gradients": gradients}
    torch.save(results, folder / f"rank{rank}.pt")
    del loss, model  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
