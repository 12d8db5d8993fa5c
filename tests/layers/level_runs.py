"""Runs of a model at a level of activation memory, and a model with low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.recompute.activation_memory import (
    LEVELS,
)

MIXED = ["checkpoint", "lean@host", "mlp"]


CHOICES = [*LEVELS, MIXED]


class LowRank(nn.Module):
    """A frozen projection with a trained low-rank path, like an adapter's wrapper."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.randn(base.out_features, 3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.a.T @ self.b.T


def wrap(model, dropout=0.0):
    torch.manual_seed(3)
    for layer in model.layers:
        layer.self_attn.qkv_proj = LowRank(layer.self_attn.qkv_proj, dropout)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj, dropout)
    return model


def run(model, batch) -> dict[str, Tensor]:
    """The loss, the logits and every gradient."""
    model.zero_grad()
    torch.manual_seed(5)  # for dropout
    output = model(**batch, return_logits=True)
    with torch.autocast("cpu", enabled=False):
        output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
