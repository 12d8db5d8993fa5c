"""One rank of test_clamped_weights.py: two steps of gradient descent under FSDP2, with each layer sharded,
and with the whole model in one group.

The folder has task.pt. The results are losses and gradients of each step and the weights after both, or the
error.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import liger_models
from liger_models.convert.errors import ConfigError


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    task = torch.load(folder / "task.pt")
    found: dict[str, Any] = {}
    for way in ("layers", "model"):
        model = liger_models.from_config(task["config"])
        model.load_state_dict(task["state"])
        for layer in model.layers if way == "layers" else ():
            fully_shard(layer)
        fully_shard(model)
        try:
            found[way] = train(model, task["batch"].chunk(ranks)[rank], task["rate"])
        except ConfigError as error:
            found[way] = str(error)
    return found


def train(model: Any, ids: torch.Tensor, rate: float) -> list[dict[str, torch.Tensor]]:
    """The loss and gradients of two steps, and the weights after these."""
    optimizer, found = torch.optim.SGD(model.train().parameters(), rate), []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {name: whole(p.detach()) for name, p in model.named_parameters()}]


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
