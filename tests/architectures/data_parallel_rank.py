"""One rank of test_distributed.py: forward and backward over its half of a batch, under torch's own wrapper.

Run as `python data_parallel_rank.py FOLDER WRAPPER LEVEL`, with task.pt in the folder; writes rank0.pt or
rank1.pt there. WRAPPER is ddp or fsdp, LEVEL one of activation memory.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.model import CausalLM


def main(folder: Path, wrapper: str, level: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    task = torch.load(folder / "task.pt")
    architecture = find_architecture(task["config"]["model_type"])
    model = CausalLM(architecture.spec(HFConfig.load(task["config"])), activation_memory=level)
    model.load_state_dict(task["state"])
    own = {name: value.chunk(ranks)[rank] for name, value in task["batch"].items()}

    # Gradients are averaged over ranks, so each divides by its share of the labels of all.
    labels = (own["labels"][:, 1:] != -100).sum()
    dist.all_reduce(labels)
    if wrapper == "ddp":
        parallel = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        parallel = fully_shard(model, mesh=mesh)
    loss = parallel(**own, num_items_in_batch=labels / ranks).loss
    loss.backward()
    gradients = {
        name: p.grad if wrapper == "ddp" else p.grad.full_tensor() for name, p in model.named_parameters()
    }
    torch.save({"loss": loss.detach(), "gradients": gradients}, folder / f"rank{rank}.pt")
    del parallel, loss, model  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
