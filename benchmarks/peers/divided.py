"""transformers' model divided over several GPUs, and its training step in a group of processes that never
import anything of ours.

    python -m benchmarks.peers.divided TASK FOLDER      # started by `benchmarks.ranks.started`

FOLDER holds batch.pt; the slowest process's times are written to 0.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.ranks import be_a_rank, write
from benchmarks.training.peer import build_peer, fused_adamw, summary, time_steps


def divide_peer(model: Any, device: torch.device) -> Any:
    """By FSDP2 as is usual: every layer, and the model. Gradients are added up in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def _main(task: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist

    # transformers looks for a package called kernels, and would find ours in the checkout.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = build_peer(task["config"], task["reference"], set(task["options"]), task["memory"], device)
    if not task["alone"]:
        model = divide_peer(model, device)
    batch = torch.load(folder / "batch.pt", weights_only=True, map_location=device)
    optimizer = fused_adamw(model, device)
    times, _ = time_steps(model, optimizer, batch, task["warmup"], task["steps"], device)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "liger_models")
    assert not ours, f"the process has imported {ours}"
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, summary(times, task["tokens"]))
    if rank == 0:
        write(folder / "0.json", max(of_all, key=lambda found: found["step_ms"]))


if __name__ == "__main__":
    be_a_rank(_main)
