"""Training with transformers and PEFT, over the batches of a run."""

from __future__ import annotations

import pytest
import torch

from liger_models.training.learning_rate import LearningRate
from liger_models.training.optimizer import BETAS, EPS

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ADAPTER = "adapter_model.safetensors"
# Bound for adapters after a few steps. AdamW moves each element by about the learning rate, whatever the size
# of its gradient: where a float32 gradient is tiny, and so its relative error large, runs may diverge.
DRIFT = 1e-3


def stock(folder, adapter=None, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, device_map={"": "cpu"}, **options
    )
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def train_stock(model, run, steps):
    """Train in a plain loop over the documents of the run's batches, one at a time."""
    config, losses = run.config, []
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPS)
    for step in range(steps):
        rows = run.stream.take(run.rows_per_step)
        labels, loss = run.documents.count(rows).labels, 0.0
        for piece in (piece for row in rows for piece in row):
            ids = run.documents.inputs(piece)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            share = torch.nn.functional.cross_entropy(
                logits, run.documents.labels(piece), reduction="sum", ignore_index=-100
            )
            (share / labels).backward()
            loss += share.item() / labels
        torch.nn.utils.clip_grad_norm_(trained, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = LearningRate(config.schedule, config.lr, steps, config.warmup).rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def distance(found, expected):
    assert found.keys() == expected.keys()
    return max(
        (found[name] - tensor).norm().item() / max(tensor.norm().item(), 1e-12)
        for name, tensor in expected.items()
    )
