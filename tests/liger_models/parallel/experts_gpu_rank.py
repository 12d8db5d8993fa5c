"""One rank of test_experts_on_two_gpus.py: a layer in bfloat16 whose experts are shared by two GPUs.

The results are the relative distances of the output and of every gradient to float64's, for the shared layer
and for the same layer in one process; and whether a second run, in which the host must not wait for the GPU,
has the same bits.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from liger_models.layers.experts import expert_parallel
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.specs import ClampedSwiGLU, MLPSpec, MoESpec

TOKENS = (1500, 700)
SPECS = {
    "gated": MoESpec(16, 4, 192, shared_expert=MLPSpec(128)),
    "biases": MoESpec(16, 4, 192, activation=ClampedSwiGLU(1.7, 7.0), bias=True),
    "on one rank": MoESpec(16, 4, 192),  # all tokens choose experts of the first
    "a token's only expert": MoESpec(16, 1, 192),  # sent to the ranks that need it
}


class Batch:
    """Substitute for a batch in which the ranks' numbers of tokens stay the same."""


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    expert_parallel.LEAST_BYTES = 0  # tokens are few here
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (ranks,))
    return {name: _compare(spec, rank, ranks, mesh, device) for name, spec in SPECS.items()}


def _compare(spec: MoESpec, rank: int, ranks: int, mesh: Any, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    exact = MixtureOfExperts(256, spec).to(device, torch.float64)
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.normal_(0, p.shape[-1] ** -0.5).bfloat16())
    alone, shared = (MixtureOfExperts(256, spec).to(device, torch.bfloat16) for _ in range(2))
    for layer in (alone, shared):
        layer.load_state_dict(exact.state_dict())
    x = torch.randn(sum(TOKENS), 256, device=device).bfloat16()
    dy = torch.randn(sum(TOKENS), 256, device=device).bfloat16()
    with torch.no_grad():
        weights, chosen = alone.router(x)[1:]  # one choice for all, in whatever dtype
        routing = weights, chosen // ranks if spec is SPECS["on one rank"] else chosen
    own = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    divide_experts(shared, mesh)
    batch = Batch()

    def run(layer: MixtureOfExperts, tokens: slice, waiting: str = "default") -> dict[str, torch.Tensor]:
        layer.zero_grad()
        dtype = next(layer.parameters()).dtype
        given = x[tokens].to(dtype).requires_grad_()
        weights = routing[0][tokens].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        upstream = dy[tokens].to(dtype)
        torch.cuda.set_sync_debug_mode(waiting)
        y = layer.experts(given, weights, routing[1][tokens], batch)
        y.backward(upstream)
        torch.cuda.set_sync_debug_mode("default")
        found = {"y": y.detach(), "x": given.grad, "weights": weights.grad}
        for name, p in layer.experts.named_parameters():
            grad = p.grad.full_tensor() * ranks if hasattr(p.grad, "full_tensor") else p.grad
            found[name] = grad.clone()
        return found

    everything = slice(None)
    truth, one = run(exact, everything), run(alone, everything)
    run(shared, own)  # compiles, and exchanges the numbers of tokens
    found = run(shared, own)
    waits = spec.experts_per_token < ranks  # then the host waits for sizes
    again = run(shared, own, "default" if waits else "error")
    distances = {}
    for name, true in truth.items():
        cut = own if name in ("y", "x", "weights") else everything
        true = true[cut]
        distances[name] = tuple(
            float((r.double() - true).norm() / true.norm()) for r in (found[name], one[name][cut])
        )
    return {"distances": distances, "same bits": all(torch.equal(found[n], again[n]) for n in found)}
