"""One rank of test_distributed.py: forward and backward over its half of a batch, under torch's own wrapper.

Reads task.pt in the folder and returns the loss and the gradients. The wrapper is ddp or fsdp.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.model.causal_lm import CausalLM


def results(folder: Path, rank: int, ranks: int, wrapper: str, level: str) -> dict[str, Any]:
    task = torch.load(folder / "task.pt")
    architecture = find_architecture(task["config"]["model_type"])
    model = CausalLM(architecture.spec(HFConfig.load(task["config"])), activation_memory=level)
    model.load_state_dict(task["state"])
    own = {name: value.chunk(ranks)[rank] for name, value in task["batch"].items()}

    # Gradients are averaged over ranks, so each rank divides by the mean number of labels per rank.
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
    return {"loss": loss.detach(), "gradients": gradients}
