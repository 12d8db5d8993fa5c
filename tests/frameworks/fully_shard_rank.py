"""One rank of test_fully_shard.py: forward and backward over its share of a batch under FSDP2.

The folder has task.pt. The results are losses and gradients by activation-memory level and parameter dtype.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_models


def results(folder: Path, rank: int, ranks: int, device: str) -> dict[Any, Any]:
    mesh = init_device_mesh(device, (ranks,))
    task = torch.load(folder / "task.pt", weights_only=False)
    own = {name: value.chunk(ranks)[rank].to(device) for name, value in task["batch"].items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for level, dtype in task["cases"]:
        model = liger_models.from_config(task["config"], activation_memory=level)
        model.load_state_dict(task["state"])
        model.to(device=device, dtype=dtype)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))
        loss = model(**own, num_items_in_batch=task["num_items"]).loss
        loss.backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients = {name: gradient.full_tensor().cpu() for name, gradient in trained.items()}
        found[level, dtype] = {"loss": loss.detach().cpu(), "gradients": gradients}
    return found
