"""One rank of test_ranks.py: the first rank has sounds, the other only text, sharded by FSDP2.

The folder has task.pt, with the checkpoint's folder, a call for each rank and the divisor, by family.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import liger_models
import liger_models.hf


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    task, found = torch.load(folder / "task.pt", weights_only=False), {}
    for family, (checkpoint, calls, labels) in task.items():
        for dtype in (torch.float32, torch.bfloat16):
            for kind, make in (("native", native), ("transformers", in_transformers)):
                model = make(family, checkpoint, dtype)
                loss = model(**calls[rank], num_items_in_batch=labels / ranks).loss
                loss.backward()
                gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
                model.zero_grad()
                model(**calls[1], num_items_in_batch=labels / ranks).loss.backward()  # text in all processes
                of_text = {n for n, p in model.named_parameters() if p.grad is not None}
                found[family, kind, dtype] = (loss.item(), gradients, of_text)
    return found


def native(family: str, checkpoint: Path, dtype: torch.dtype) -> Any:
    return liger_models.parallelize(liger_models.from_hub(checkpoint).train(), compute_dtype=dtype)


def in_transformers(family: str, checkpoint: Path, dtype: torch.dtype) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = liger_models.hf.classes_of(family).causal_lm.from_pretrained(checkpoint).train()
    for layer in [m for m in model.modules() if type(m).__name__ in model._no_split_modules]:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
