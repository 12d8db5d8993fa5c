"""One rank of test_experts.py: runs models whose experts are divided over ranks.

task.pt lies in the folder, the cases by name, and a checkpoint NAME of each. Gives by case the loss, whole
gradients, their norm, the routers' biases after an update, and what was read and held. All ranks write
NAME/saved.
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch

import liger_models
from liger_models import ParallelDims, parallelize, update_correction_bias
from liger_models.optim import AdamW


def results(folder: Path, rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, case in torch.load(folder / "task.pt", weights_only=False).items():
        dims = ParallelDims(**case["dims"])
        data = ranks // dims.sequence
        batch = case["batches"][rank // dims.sequence]
        with Count() as count:
            model = liger_models.from_hub(folder / name, shard=functools.partial(parallelize, mesh=dims))
        held = {p: p.to_local().nbytes for p in model.parameters()} | {b: b.nbytes for b in model.buffers()}
        model.set_activation_memory(case["level"])
        loss = model(**batch, num_items_in_batch=case["num_items"] / data).loss
        loss.backward()
        norm = AdamW(model.parameters()).clip_grad_norm(1.0)
        update_correction_bias(model)
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("correction_bias")}
        found[name] = {"loss": loss.detach(), "gradients": gradients, "norm": norm, "biases": biases}
        found[name] |= {"read": count.nbytes, "held": sum(held.values())}
        for bias in case["biases"]:
            model.get_buffer(bias).copy_(case["biases"][bias])
        model.save_pretrained(folder / name / "saved")
    return found


class Count:
    """Counts the bytes that are read from checkpoints."""

    def __enter__(self):
        self.nbytes, self.true = 0, os.preadv
        os.preadv = self
        return self

    def __call__(self, fd, buffers, offset):
        count = self.true(fd, buffers, offset)
        self.nbytes += count
        return count

    def __exit__(self, *exc):
        os.preadv = self.true
