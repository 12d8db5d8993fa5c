"""One rank of test_lora.py: a step with LoRA under FSDP2 over its share of a batch.

Run as `python lora_rank.py FOLDER`, with model/ (a checkpoint), adapter/ and batch.pt in the folder; writes
rank0.pt, rank1.pt there: the loss and the adapters' gradients, whole, and how often our operation ran.
"""

import os
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import liger_models.hf
import liger_models.layers.packed_linear as packed_linear


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
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
    result = {"loss": loss.detach(), "gradients": gradients, "calls": len(calls)}
    torch.save(result, folder / f"rank{rank}.pt")
    del loss, model, adapted  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
