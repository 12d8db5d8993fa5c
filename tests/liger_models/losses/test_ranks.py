"""Every loss is the mean over its step: over ranks, micro-batches and packed rows of different sizes.

This holds with DDP and FSDP2, with and without adapters."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture
from liger_models.losses import kto_kl

pytest.importorskip("peft")

RANK = Path(__file__).with_name("losses_rank.py")
SEQ = 8
LENGTHS = [8, 5, 7, 4, 6, 5, 8, 6, 7, 3]  # five chosen answers with their prompts, then five rejected ones


def task_of(model):
    ids = torch.randint(3, model.spec.vocab_size, (10, SEQ))
    mask = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask | (torch.arange(SEQ) < 2), -100)
    counted = labels[:, 1:] != -100
    with torch.no_grad():
        scores = model.score(ids, labels, attention_mask=mask).log_probs
    noise = 0.3 * torch.randn(2, *scores.shape).double() * counted
    given = {
        "ids": ids,
        "labels": labels,
        "mask": mask,
        "counted": counted,
        "reference": scores + noise[0],
        "old": scores + noise[1],
        "advantages": torch.randn(10).double(),
        "good": torch.rand(10) < 0.5,
    }
    tokens = counted.sum(1)
    return {
        "spec": model.spec,
        "state": {name: p.clone() for name, p in model.state_dict().items()},
        "given": given,
        "strangers": [torch.rand(2, 3).double(), torch.rand(2, 5).double() - torch.tensor([[0.0], [1.0]])],
        "pairs": [[torch.tensor([0]), torch.tensor([1])], [torch.tensor([2, 3]), torch.tensor([4])]],
        "counts": {
            "pairs": 5,
            "answers": 10,
            "tokens": tokens.sum().item(),
            "chosen": tokens[:5].sum().item(),
        },
    }


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_every_loss_of_uneven_parts_has_the_gradient_of_the_whole_step(tmp_path, request):
    """Compare in float64, since parts are summed in another order. At night all losses have all wrappers."""
    every = request.config.getoption("--all-families")
    torch.manual_seed(0)
    model = liger_models.from_config({**find_architecture("gemma2").tiny, "num_hidden_layers": 1}).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    task = task_of(model)
    torch.save(task, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path, "every" if every else "in turn")

    program = runpy.run_path(str(RANK))
    given = task["given"] | {"kl": kto_kl(*torch.cat(task["strangers"], 1))}
    assert given["kl"] > 0
    nothing = dict.fromkeys(task["counts"])
    for adapters in ("", ", adapters"):
        model = program["adapted"](model) if adapters else model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, loss in program["LOSSES"].items():
            scores = program["scores_of"](model, given, packed=False)
            expected = torch.autograd.grad(loss(*scores, given, nothing), list(named.values()))
            assert all(gradient.any() for gradient in expected), name
            for wrapper in ("fsdp, adapters",) if adapters else ("ddp", "fsdp"):
                if name not in program["losses_with"](wrapper, every):
                    continue
                for results in found:
                    for (key, other), gradient in zip(results[wrapper][name].items(), expected, strict=True):
                        distance = (other - gradient).norm()
                        assert distance <= 1e-9 * gradient.norm(), (wrapper, name, key)
