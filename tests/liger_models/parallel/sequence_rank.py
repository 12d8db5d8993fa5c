"""One rank of test_sequences.py: run models whose sequences are split over the ranks.

The folder has task.pt, a list of cases; the results are those of `run` for each.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapted import with_adapters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models import ParallelDims, parallelize, update_correction_bias
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.layers.sequences.sequence_parallel import divide_sequences


def results(folder: Path, rank: int, ranks: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (ranks,))
    cases = torch.load(folder / "task.pt", weights_only=False)
    return [run(mesh=mesh, **case) for case in cases]


def run(
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    batch: dict[str, Any],
    level: str = "lean",
    wrapper: str | None = None,
    adapters: bool = False,
    pass_states: bool = False,
    wide: bool = False,
    trained: str = "",
    mesh: Any = None,
) -> dict[str, Any]:
    """Return the loss, gradients, correction biases after an update, logits and scores.

    With a mesh, losses and gradients are means over its ranks; without one, a single process runs.
    """
    budget = "1.2MB" if level == "auto" else None
    options = {"projections": "split" if adapters else "fused", "memory_budget": budget}
    model = liger_models.from_config(config, activation_memory=level, **options)
    model.load_state_dict(state)
    if wide:
        model.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    if mesh is None:
        called: Any = model
    elif wrapper == "parallelize":
        called = parallelize(model, ParallelDims(sequence=mesh.size()))
    else:
        called = divide_sequences(model, mesh, pass_states)
    if adapters:
        called = with_adapters(model)
    if wrapper == "ddp":
        called = DistributedDataParallel(model)
    inputs = {name: value for name, value in batch.items() if "label" not in name and "num" not in name}
    weights = torch.linspace(-1, 2, inputs["input_ids"].numel()).view_as(inputs["input_ids"])
    scored = {**inputs, "shift_labels": inputs["input_ids"]}
    with torch.no_grad():
        logits = called(**inputs).logits
        known = called(**scored, score=ScoreOptions(coefficients=weights)).weighted_sum
    update_correction_bias(model, rate=0.0)  # resets the load counted in these passes
    loss = called(**batch).loss
    loss.backward()
    gradients = mean_gradients(model, mesh, wrapper)
    update_correction_bias(model)
    biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("correction_bias")}
    model.zero_grad()
    scores = called(**scored, score=ScoreOptions(entropy=True, top1=True))
    added = [] if scores.router_loss is None else [scores.router_loss]
    torch.stack([(weights * scores.log_probs).sum(), scores.entropy.sum(), *added]).sum().backward()
    scores = {**scores, "weighted_sum": known}
    return {
        "loss": loss.detach(),
        "gradients": gradients,
        "biases": biases,
        "logits": logits,
        "scores": {name: score.detach().float() for name, score in scores.items() if score is not None},
        "gradients of scores": mean_gradients(model, mesh, wrapper),
    }


def mean_gradients(model: Any, mesh: Any, wrapper: str | None) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if wrapper == "parallelize":
        return {name: gradient.full_tensor() for name, gradient in gradients.items()}
    if mesh is not None and wrapper is None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
    return {name: gradient.clone() for name, gradient in gradients.items()}
