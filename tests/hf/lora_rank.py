"""One rank of test_lora.py: a step with LoRA under FSDP2 over its share of a batch.

The folder has model/ (a checkpoint), adapter/ and batch.pt. The results are the loss, the adapters' gathered
gradients, and how often our operation ran.
"""

from pathlib import Path
from typing import Any

import peft
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import liger_models.hf
import liger_models.layers.projections.packed_linear as packed_linear


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    liger_models.hf.register(projections="split")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).train()
    calls, own = [], packed_linear.low_rank_linear
    packed_linear.low_rank_linear = lambda x, *projections: calls.append(1) or own(x, *projections)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = torch.load(folder / "batch.pt")
    loss = adapted(**{name: rows.chunk(ranks)[rank] for name, rows in batch.items()}).loss
    loss.backward()
    named = adapted.named_parameters()
    gradients = {name: p.grad.full_tensor() for name, p in named if p.requires_grad}
    return {"loss": loss.detach(), "gradients": gradients, "calls": len(calls)}
