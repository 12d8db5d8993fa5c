"""One rank of test_experts.py: run models whose experts are sharded over ranks.

The folder has task.pt, with the cases by name, and a checkpoint NAME for each case. The results are, by case,
the loss, full gradients, their norm, correction biases after an update, and the bytes read and held; and, for
both forms of the kernels, found and expected values of a layer with tokens on the last rank only. All ranks
write NAME/saved.
"""

import contextlib
import functools
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from ranks import Count
from torch.distributed.device_mesh import init_device_mesh

import liger_models
from liger_models import ParallelDims, parallelize, update_correction_bias
from liger_models.kernels import ClampedSwiGLU, ExpertPath
from liger_models.kernels._dispatch import interpret, interpreted
from liger_models.layers.experts import expert_parallel, moe
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.specs import MLPSpec, MoESpec
from liger_models.optim.adamw import AdamW, clip_grad_norm_


def results(folder: Path, rank: int, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    expert_parallel.LEAST_BYTES = 0  # tokens are few here
    found = {}
    for name, case in torch.load(folder / "task.pt", weights_only=False).items():
        dims = ParallelDims(**case["dims"])
        data = ranks // dims.sequence
        batch = case["batches"][rank // dims.sequence]
        with Count() as count:
            model = liger_models.from_hub(folder / name, shard=functools.partial(parallelize, mesh=dims))
        held = {p: p.to_local().nbytes for p in model.parameters()} | {b: b.nbytes for b in model.buffers()}
        model.set_activation_memory(case["level"])
        loss = model(**batch, num_items_in_batch=case["num_items"] / data).loss
        loss.backward()
        norm = AdamW(model.parameters()).clip_grad_norm(1.0)
        update_correction_bias(model)
        gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("correction_bias")}
        found[name] = {"loss": loss.detach(), "gradients": gradients, "norm": norm, "biases": biases}
        found[name]["norm before clipping"] = clip_grad_norm_(model.parameters(), 0.5 * norm.item())
        found[name]["clipped"] = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found[name] |= {"read": count.nbytes, "held": sum(held.values())}
        alternating = [p for n, p in model.named_parameters() if n.endswith("gate_up_proj_bias")]
        found[name]["alternating"] = sum(held[p] for p in alternating)
        for bias in case["biases"]:
            model.get_buffer(bias).copy_(case["biases"][bias])
        model.save_pretrained(folder / name / "saved")
    # The interpreter is slow, so it runs on two ranks only.
    forms = {"plain": contextlib.nullcontext} | ({"triton": interpret} if interpreted and ranks == 2 else {})
    return found, {form: with_tokens_on_the_last(rank, ranks, forms[form]) for form in forms}


def _noted(begun: list[str], function: Any, *args: Any, **options: Any) -> torch.Tensor:
    begun.append("experts")
    return function(*args, **options)


def with_tokens_on_the_last(rank: int, ranks: int, form: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    spec = MoESpec(8, 2, 12, ClampedSwiGLU(1.7, 7.0), bias=True, shared_expert=MLPSpec(8))
    torch.manual_seed(0)
    alone, layer = (MixtureOfExperts(20, spec) for _ in range(2))
    with torch.no_grad():
        for p in alone.parameters():
            p.normal_(0, 0.3)
    layer.load_state_dict(alone.state_dict())
    ab = [torch.randn(8 * 3, 20), torch.randn(24, 3 * 8), torch.randn(8 * 2, 12), torch.randn(20, 2 * 8)]
    true_ab, own_ab = ([x.clone().requires_grad_() for x in ab] for _ in range(2))
    for mixture, (a, b, c, d) in ((alone, true_ab), (layer, own_ab)):
        paths = {"gate_up_proj": [ExpertPath(a, b, 0.1)], "down_proj": [ExpertPath(c, d, 0.2)]}
        mixture.experts.forward = functools.partial(mixture.experts.forward, paths=paths)
    divide_experts(layer, init_device_mesh("cpu", (ranks,)))
    x = torch.randn(7, 20)
    true_x, own_x = x.clone().requires_grad_(), x[: 7 * (rank == ranks - 1)].clone().requires_grad_()
    true = alone(true_x)
    (true.square().sum() / ranks).backward()
    begun: list[str] = []
    layer.shared_expert.register_forward_pre_hook(lambda *_: begun.append("shared"))
    products = functools.partial(_noted, begun, moe.moe_experts)
    with form(), unittest.mock.patch.object(moe, "moe_experts", products):
        y = layer(own_x)
        y.square().sum().backward()
    # Two ranks are no more than a token's experts: then the shared expert runs while tokens travel.
    first = torch.tensor(begun == ["shared", "experts"]), torch.tensor(ranks <= 2)
    found = {"y": (y.detach(), true.detach()), "dx": (own_x.grad / ranks, true_x.grad)} if len(y) else {}
    for (name, p), q in zip(layer.experts.named_parameters(), alone.experts.parameters(), strict=True):
        found[name] = p.grad.full_tensor(), q.grad
    found["shared expert first"] = first[0].float(), first[1].float()
    for i, (of_path, true_path) in enumerate(zip(own_ab, true_ab, strict=True)):
        torch.distributed.all_reduce(of_path.grad)
        found[f"path {i}"] = of_path.grad / ranks, true_path.grad
    return found
