"""One rank of test_optim.py: the same training with fully_shard and in one process, both by this rank.

Run as `python optimizer_rank.py FOLDER`; writes rank0.pt or rank1.pt there.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from liger_models.optim import AdamW

STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    # Nine rows are not divided evenly, and of one row the second rank has nothing.
    layers = nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 1), nn.Linear(1, 6)
    return nn.Sequential(*layers).to(torch.bfloat16)


def build(weights: str, mesh) -> tuple[nn.Module, AdamW]:
    model = network()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), lr=1e-2, weights=weights, seed=3)


def train(model: nn.Module, optimizer: AdamW, steps: range) -> list[float]:
    norms = []
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8).bfloat16()).float().square().sum().backward()
        # Without a limit: the norm is summed in another order, and a factor would differ in its last bit.
        norms.append(optimizer.clip_grad_norm(float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in values.items()
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    results = {}
    for weights in ("stochastic", "master"):
        alone, optimizer = build(weights, None)
        expected_norms = train(alone, optimizer, range(STEPS))
        sharded, optimizer = build(weights, mesh)
        norms = train(sharded, optimizer, range(STEPS))

        stopped, optimizer = build(weights, mesh)
        train(stopped, optimizer, range(2))
        state = get_optimizer_state_dict(stopped, optimizer)
        again = AdamW(stopped.parameters(), lr=1e-2, weights=weights, seed=3)
        set_optimizer_state_dict(stopped, again, state)
        train(stopped, again, range(2, STEPS))
        results[weights] = {
            "norms": norms,
            "expected norms": expected_norms,
            "sharded": full(sharded),
            "resumed": full(stopped),
            "expected": full(alone),
        }
        del alone, sharded, stopped
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
