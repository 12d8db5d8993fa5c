"""One rank of test_float8_sharded.py: forward and backward of a float8 model over its half of a batch, under
FSDP2 with parameters in float32 or bfloat16, which gathers and computes in bfloat16.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_models
from liger_models import set_float8


def make_model(config: dict[str, Any], recipe: str, level: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = liger_models.from_config(config, dtype=dtype, device="cpu", activation_memory=level)
    set_float8(model, recipe, emulate=True, all_sizes=True)
    return model


def results(folder: Path, rank: int, ranks: int, recipe: str, level: str, stored: str) -> dict[str, Any]:
    task = torch.load(folder / "task.pt")
    model = make_model(task["config"], recipe, level, getattr(torch, stored))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    own = task["ids"].chunk(ranks)[rank]
    loss = model(own, labels=own).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": {name: p.grad.full_tensor() for name, p in model.named_parameters()},
    }
