"""One rank of test_text_steps.py: some steps have only text, in every process and micro-batch.

The folder has task.pt. The results are the parameters after all steps, by family and wrapper.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import liger_models


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    task, found = torch.load(folder / "task.pt", weights_only=False), {}
    for family, (config, state, steps, options) in task.items():
        for wrapper in ("ddp", "fsdp", "gathered once"):
            model = liger_models.from_config(config)
            model.load_state_dict(state)
            if wrapper == "ddp":
                wrapped: Any = DistributedDataParallel(model)
            else:
                wrapped = liger_models.parallelize(model, reshard_after_forward=wrapper == "fsdp")
            optimizer = torch.optim.SGD(model.parameters(), **options)
            for batches, labels in steps:
                for i, calls in enumerate(batches):
                    waits = wrapper == "ddp" and i + 1 < len(batches)
                    with wrapped.no_sync() if waits else nullcontext():
                        wrapped(**calls[rank], num_items_in_batch=labels / ranks).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found[family, wrapper] = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return found


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
