"""The ranks of test_sequences.py, which run models whose sequences are divided over two ranks.

Run as `python sequence_rank.py FOLDER`, with task.pt in the folder, a list of cases; each rank writes
rank0.pt or rank1.pt with what `run` returns for each.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models import ParallelDims, parallelize, update_correction_bias
from liger_models.layers.sequence_parallel import divide_sequences


def main(folder: Path, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    cases = torch.load(folder / "task.pt", weights_only=False)
    torch.save([run(mesh=mesh, **case) for case in cases], folder / f"rank{rank}.pt")


def run(
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    batch: dict[str, Any],
    level: str = "lean",
    wrapper: str | None = None,
    mesh: Any = None,
) -> dict[str, Any]:
    """The loss, the gradients, the routers' biases after an update, and the logits; of a mesh of ranks their
    means. Without a mesh of one process alone.
    """
    model = liger_models.from_config(config, activation_memory=level)
    model.load_state_dict(state)
    if mesh is None:
        called: Any = model
    elif wrapper == "parallelize":
        called = parallelize(model, ParallelDims(sequence=mesh.size()))
    else:
        called = divide_sequences(model, mesh)
    if wrapper == "ddp":
        called = DistributedDataParallel(model)
    loss = called(**batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if wrapper == "parallelize":
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    elif mesh is not None and wrapper is None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
    update_correction_bias(model)
    biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("correction_bias")}
    inputs = {name: value for name, value in batch.items() if "label" not in name and "num" not in name}
    with torch.no_grad():
        logits = called(**inputs).logits
    return {"loss": loss.detach(), "gradients": gradients, "biases": biases, "logits": logits}


if __name__ == "__main__":
    from forked_ranks import run_ranks

    run_ranks(main, Path(sys.argv[1]), 2)
