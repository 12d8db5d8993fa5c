"""Fine-tune a checkpoint on several GPUs in a plain training loop: each process holds a parameter shard
(FSDP2), reads only that part, and trains on its own rows. Data and `out` are as in train_in_a_loop.py.

    torchrun --nproc-per-node=8 examples/train_on_eight_gpus.py meta-llama/Llama-3.2-1B data.jsonl out

It needs `pip install 'liger_models[hf]'`, for the tokenizer. Without GPUs it runs on CPUs, over gloo: two
processes (--nproc-per-node=2) train a checkpoint of a few million parameters in seconds.
"""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
from train_in_a_loop import pack
from train_with_trainer import tokenize
from transformers import AutoTokenizer

import liger_models


def main(
    checkpoint: str, data: str, out: str, epochs: int = 1, batch_size: int = 4, learning_rate: float = 2e-5
) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    divide = functools.partial(liger_models.parallelize, compute_dtype=torch.bfloat16)
    model = liger_models.from_hub(checkpoint, dtype="float32", shard=divide).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with open(data, encoding="utf-8") as lines:
        rows = [tokenize(tokenizer, **json.loads(line)) for line in lines]
    step, losses = batch_size * ranks, []  # rows that fill no step are left out
    for start in [*range(0, len(rows) - step + 1, step)] * epochs:
        batch = pack(rows[start + rank : start + step : ranks], device)
        labels = (batch["labels"] != -100).sum()
        dist.all_reduce(labels)  # gradients are averaged: each process divides by its share of all labels
        loss = model(**batch, num_items_in_batch=labels.item() / ranks).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(out)  # all processes together; the first one writes
    if rank == 0:
        tokenizer.save_pretrained(out)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("checkpoint", "data", "out"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
    dist.destroy_process_group()  # once the model is gone
