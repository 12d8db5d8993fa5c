"""One rank of test_float8_gathered.py: two steps of a float8 model under FSDP2, whose weights are gathered in
float8; saved after the first and repeated by a second model.
"""

from pathlib import Path
from typing import Any

import torch
from float8_rank import make_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from liger_models import gather_in_float8, set_float8


def divided(task: dict[str, Any], recipe: str, level: str, stored: str, ranks: int) -> tuple[Any, list[str]]:
    model = make_model(task["config"], recipe, level, getattr(torch, stored))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, gather_in_float8(model)


def step(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    for p in model.parameters():
        p.grad = None
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {"loss": loss.detach(), "gradients": gradients}


def results(folder: Path, rank: int, ranks: int, recipe: str, level: str, stored: str) -> dict[str, Any]:
    task = torch.load(folder / "task.pt")
    model, paths = divided(task, recipe, level, stored, ranks)
    gathered = []
    for path in paths:
        seen = lambda layer, *_: gathered.append((type(layer.weight).__name__, layer.weight.dtype))  # noqa: E731
        model.get_submodule(path).register_forward_pre_hook(seen)
    own = task["ids"].chunk(ranks)[rank]
    first = step(model, own)
    saved = get_model_state_dict(model)
    torch.save({name: weight.full_tensor() for name, weight in saved.items()}, folder / f"saved{rank}.pt")
    saved = {name: weight.full_tensor().clone() for name, weight in saved.items()}
    second = step(model, own)
    again, _ = divided(task, recipe, level, stored, ranks)
    set_model_state_dict(
        again,
        saved,
        options=torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True),
    )
    resumed = step(again, own)
    refused = []
    for change in (lambda: set_float8(model, None), lambda: gather_in_float8(model)):
        try:
            change()
        except (ValueError, RuntimeError) as error:
            refused.append(str(error))
    local = {(type(p.to_local()), p.dtype) for p in model.parameters()}
    return {
        "steps": (first, second),
        "resumed": resumed,
        "paths": paths,
        "gathered": gathered,
        "local": local,
        "refused": refused,
    }
