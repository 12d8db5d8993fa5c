"""One rank of test_optim.py: the same training with fully_shard and unsharded, both run by this rank.

The results are norms and parameters by form of weights and location of the optimizer state, and parameters by
optimizer of another library.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from liger_models.convert.checkpoints.expressions import Cat, Ref, Stack
from liger_models.optim import muon
from liger_models.optim.adamw import AdamW
from liger_models.optim.library import MUON, OPTIMIZERS, LibraryOptimizer

STEPS = 4
FORMS = (("stochastic", None), ("master", None), ("master", "cpu"))  # of weights, and location of the state


def network() -> nn.Module:
    torch.manual_seed(0)
    # Nine rows are sharded unevenly, and a single row leaves nothing to the second rank.
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
    return found | {"libraries": of_libraries(mesh), "muon": of_muon(ranks)}


def of_libraries(mesh) -> dict[str, Any]:
    """For each: a sharded network, an unsharded one, and the names of the sharded state."""
    found = {}
    for name in OPTIMIZERS[1:]:
        if name == "adamw_8bit" and not importlib.util.find_spec("bitsandbytes"):
            continue
        trained = []
        for shared in (mesh, None):
            torch.manual_seed(0)
            model = nn.Linear(64, 81)  # of 81 rows the ranks have 41 and 40; the moments are in 8 bits
            if shared is not None:
                fully_shard(model, mesh=shared)
            group = {"params": [model.weight], "library": name, "weight_decay": 0.1}
            form = Cat((Ref("q", (50, 64)), Ref("k", (31, 64))))
            others = {"params": [model.bias], "library": None if name in MUON else name}
            optimizer = LibraryOptimizer([group, others], lr=1e-2, forms={model.weight: form})
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randn(4, 64)).square().sum().backward()
                optimizer.clip_grad_norm(float("inf"))
                optimizer.step()
                optimizer.zero_grad()
            trained.append(full(model))
            if shared is not None:
                state = optimizer.state[model.weight]
                sharded = sorted(key for key, value in state.items() if hasattr(value, "full_tensor"))
        found[name] = (*trained, sharded)
    return found


class Matrices(nn.Module):
    """Parameters that Muon updates: fused ones, stacks, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"qkv": (37, 16), "o": (16, 24), "row": (1, 8), "experts": (3, 12, 8), "stack": (4, 6, 5)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16()))

    def forms(self) -> dict[torch.Tensor, Any]:
        qkv = Cat((Ref("q", (25, 16)), Ref("k", (5, 16)), Ref("v", (7, 16))))
        experts = [Cat((Ref(f"{n}.gate", (9, 8)), Ref(f"{n}.up", (3, 8)))) for n in range(3)]
        return {self.qkv: qkv, self.experts: Stack(tuple(experts))}

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        losses = [(p.float() * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters()]
        return torch.stack(losses).sum()


def of_muon(ranks: int) -> dict[str, Any]:
    """Trained matrices by the way they are sharded, and how many parameters were gathered for the update."""
    meshes = {
        "alone": None,
        "rows": init_device_mesh("cpu", (ranks,)),
        "replicated rows": init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard")),
        "columns": init_device_mesh("cpu", (ranks,)),
    }
    found = {}
    for name, mesh in meshes.items():
        model = Matrices()
        if mesh is not None:
            place = {"shard_placement_fn": lambda p: Shard(1)} if name == "columns" else {}
            fully_shard(model, mesh=mesh, **place)
        group = {"params": list(model.parameters()), "library": "muon", "weight_decay": 0.1}
        optimizer = LibraryOptimizer([group], lr=1e-2, forms=model.forms())
        gathered, calls = muon.gathered, []
        muon.gathered = lambda *parts, gathered=gathered, calls=calls: (
            calls.append(parts),
            gathered(*parts),
        )[1]
        try:
            for step in range(3):
                model(step).backward()
                optimizer.clip_grad_norm(1e6)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            muon.gathered = gathered
        found[name] = full(model), len(calls)
    return found
