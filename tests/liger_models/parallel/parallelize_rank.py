"""One rank of test_parallelize.py: loads each model divided over the ranks, and makes gradients.

Run as `python parallelize_rank.py FOLDER`, with RANK and WORLD_SIZE set; reads FOLDER/NAME, a checkpoint, for
each case and writes FOLDER/rank{rank}.pt: by case the loss and whole gradients, and what was read and held.
"""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import liger_models
from liger_models import ParallelDims, parallelize

LEVELS = ["lean", "checkpoint", "mlp"]  # of the layers, in turn
CASES = {
    "llama": None,
    "gemma2": ParallelDims(),
    "qwen3_moe": ParallelDims(data_replicate=2),
    "qwen3": (("replicate", "shard"), (1, 2)),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    results = {}
    for family, dims in CASES.items():
        if isinstance(dims, tuple):
            dims = init_device_mesh("cpu", dims[1], mesh_dim_names=dims[0])
        with Count() as count:
            model = liger_models.from_hub(folder / family, shard=functools.partial(parallelize, mesh=dims))
        held = {p: p.to_local().numel() * p.itemsize for p in model.parameters()}
        held |= {b: b.numel() * b.itemsize for b in model.buffers()}
        model.set_activation_memory((LEVELS * len(model.layers))[: len(model.layers)])
        ids = batch(model.spec.vocab_size)
        for half in ids[rank::ranks].split(1):  # two micro-batches
            loss = model(half, labels=half, num_items_in_batch=ids.numel() / ranks).loss
            loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results[family] = {"gradients": gradients, "read": count.nbytes, "held": sum(held.values())}
    torch.save(results, folder / f"rank{rank}.pt")
    del loss, model, held  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()


def batch(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (4, 11), generator=torch.Generator().manual_seed(0))


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
