"""One rank of test_optim.py: the same training with fully_shard and unsharded, both run by this rank.

The results are norms and parameters by form of weights and location of the optimizer state.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from liger_models.optim.adamw import AdamW

STEPS = 4
FORMS = (("stochastic", None), ("master", None), ("master", "cpu"))  # of weights, and location of the state


def network() -> nn.Module:
    torch.manual_seed(0)
    # Nine rows are sharded unevenly, and of a single row the second rank has nothing.
    layers = nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 1), nn.Linear(1, 6)
    return nn.Sequential(*layers).to(torch.bfloat16)


def build(weights: str, mesh, place: str | None = None) -> tuple[nn.Module, AdamW]:
    model = network()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), lr=1e-2, weights=weights, seed=3, state_device=place)


def train(model: nn.Module, optimizer: AdamW, steps: range) -> list[float]:
    norms = []
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8).bfloat16()).float().square().sum().backward()
        # No clipping: the norm is summed in another order, so a factor would differ in its last bit.
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


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for weights, place in FORMS:
        alone, optimizer = build(weights, None)
        expected_norms = train(alone, optimizer, range(STEPS))
        sharded, optimizer = build(weights, mesh, place)
        norms = train(sharded, optimizer, range(STEPS))

        stopped, optimizer = build(weights, mesh, place)
        train(stopped, optimizer, range(2))
        state = get_optimizer_state_dict(stopped, optimizer)
        again = AdamW(stopped.parameters(), lr=1e-2, weights=weights, seed=3, state_device=place)
        set_optimizer_state_dict(stopped, again, state)
        train(stopped, again, range(2, STEPS))
        found[f"{weights} {place}"] = {
            "norms": norms,
            "expected norms": expected_norms,
            "sharded": full(sharded),
            "resumed": full(stopped),
            "expected": full(alone),
        }
    return found
