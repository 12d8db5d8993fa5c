"""One rank of test_ranks.py: the first rank has rows with pictures, the others have only text.

The folder has task.pt. The results are losses and gradients by wrapper.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import liger_models


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    task, found = torch.load(folder / "task.pt", weights_only=False), {}
    for family, (config, state, calls, labels) in task.items():
        for wrapper in ("ddp", "fsdp"):
            model = liger_models.from_config(config)
            model.load_state_dict(state)
            if wrapper == "ddp":
                wrapped: Any = nn.parallel.DistributedDataParallel(model)
            else:
                wrapped = liger_models.parallelize(model)
            loss = wrapped(**calls[rank], num_items_in_batch=labels / ranks).loss
            loss.backward()
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
            found[family, wrapper] = (loss.item(), gradients)
            model.zero_grad()
            model.freeze("vision", "projector")
            wrapped = nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else wrapped
            wrapped(**calls[rank]).loss.backward()
            with torch.no_grad():
                found[family, wrapper, "judged"] = wrapped(**calls[rank]).loss.item()
    return found


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
