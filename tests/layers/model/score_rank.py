"""One rank of test_scoring.py: losses on scores and distillation of its half of a batch, with DDP and FSDP2.

Reads task.pt in the folder. Returns the gradients of each wrapper, the error raised by scoring without DDP's
forward, and the values that losses gather from all ranks.
"""

from pathlib import Path
from typing import Any

import torch
from score_calls import Wrapped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models.layers.model import distilling, head
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.model.distilling import Distillation
from liger_models.layers.model.scoring import ScoreOptions
from liger_models.losses import kto_kl, top_entropy


def loss_of(scores):
    return (scores.log_probs.sin() + scores.entropy**2).sum()  # its coefficients are not known in advance


def in_pieces(task: dict[str, Any], own: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Gradients with a wrapped head, which processes the labels in chunks. The ranks have different
    numbers of chunks.
    """
    head._CHUNK = distilling._CHUNK = 3
    made = []
    for state in (task["state"], task["teacher"]):
        model = CausalLM(task["spec"])
        model.load_state_dict(state)
        model.lm_head = Wrapped(model.lm_head)
        model.lm_head.load_state_dict({**model.lm_head.state_dict(), "added": task["added"]})
        for part in (*model.layers, model.lm_head):
            fully_shard(part, mesh=mesh)
        made.append(fully_shard(model, mesh=mesh))
    student, teacher = made
    loss_of(student.score(**own, entropy=True)).backward()
    student(**own, num_items_in_batch=20).loss.backward()
    student.distill(teacher, **own, top_k=4, beta=0.3, num_items_in_batch=20).loss.backward()
    student.distill(teacher, **own, beta=0.3, num_items_in_batch=20).loss.backward()
    return {"pieces": {name: p.grad.full_tensor() for name, p in student.named_parameters()}}


def results(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    task = torch.load(folder / "task.pt", weights_only=False)
    own = {name: value.chunk(ranks)[rank] for name, value in task["batch"].items()}
    coefficients = own.pop("coefficients")
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for wrapper in ("ddp", "fsdp", "rounded"):
        model = CausalLM(task["spec"])
        model.load_state_dict(task["state"])
        if wrapper == "ddp":
            parallel = DistributedDataParallel(model)
            scores = parallel(**own, score=ScoreOptions(entropy=True))
            with torch.no_grad():
                assert torch.equal(model.score(**own).log_probs, scores.log_probs)
            try:
                model.score(**own)
            except RuntimeError as error:
                found["refusal"] = str(error)
        else:
            options = {}
            if wrapper == "rounded":
                options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for part in (*model.layers, model.lm_head):
                fully_shard(part, mesh=mesh, **options)
            scores = fully_shard(model, mesh=mesh, **options).score(**own, entropy=True)
        if wrapper == "rounded":
            again = model.score(**own, coefficients=coefficients)
            found["weighted"] = again.weighted_sum.item(), (coefficients * again.log_probs).sum().item()
            found["dtypes"] = scores.log_probs.dtype, scores.entropy.dtype
            policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
            rounding = fully_shard(CausalLM(task["spec"]), mesh=mesh, mp_policy=policy)
            try:
                rounding.score(**own)
            except TypeError as error:
                found["rounding"] = str(error)
            continue
        loss_of(scores).backward()
        if wrapper == "ddp":
            parallel(**own, score=ScoreOptions(coefficients=coefficients)).weighted_sum.backward()
        else:
            model.score(**own, coefficients=coefficients).weighted_sum.backward()
        found[wrapper] = {
            name: p.grad if wrapper == "ddp" else p.grad.full_tensor() for name, p in model.named_parameters()
        }
    student, teacher = (CausalLM(task["spec"]) for _ in range(2))
    student.load_state_dict(task["state"])
    teacher.load_state_dict(task["teacher"])
    for model in (student, teacher):
        for part in (*model.layers, model.lm_head):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    student.distill(teacher, **own, beta=0.3, hard_weight=0.2, num_items_in_batch=20).loss.backward()
    found["taught"] = {name: p.grad.full_tensor() for name, p in student.named_parameters()}
    student = CausalLM(task["spec"])
    student.load_state_dict(task["state"])
    lesson = Distillation(teacher, beta=0.3, hard_weight=0.2)
    parallel = DistributedDataParallel(student)
    parallel(**own, distill=lesson, num_items_in_batch=20).loss.backward()
    found["taught, ddp"] = {name: p.grad for name, p in student.named_parameters()}

    found |= in_pieces(task, own, mesh)
    values = torch.arange(3.0 + 2 * rank)  # 0 to 2, and 0 to 4
    found["kl"] = kto_kl(values, values - 1 - rank).item()
    found["top"] = top_entropy(values[None], torch.ones(1, len(values)), 0.4).sum().item()
    return found
