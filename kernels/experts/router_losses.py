"""The losses of a router in a mixture of experts, in plain PyTorch.

Load balancing (Switch Transformer, arXiv:2101.03961, equations 4 to 6), with p = softmax(logits):

    E * sum over e of (assignments to e / tokens) * (mean of p_e)

The z-loss (ST-MoE, arXiv:2202.08906, equation 5):

    mean of logsumexp(logits)^2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32
from liger_models.kernels.experts.moe_routing import check_top_k


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor],
    top_k: int,
    assignments: Tensor | None = None,
    tokens: int | None = None,
) -> Tensor:
    """Auxiliary loss for an even load.

    Args:
        logits: [T, E], or one such tensor a layer: tokens of all layers are then counted together.
        top_k: experts a token, chosen by the logits; the loss of an even load is `top_k`.
        assignments, tokens: [E] and their number, of more tokens than those of the logits, which are a part
            of them: the loss is then that part's share, and those of all parts have the sum of all.

    Returns:
        A scalar in float32 (float64 for float64 logits). Gradients flow through the probabilities alone.

    Raises:
        ValueError: no logits at all, or top_k outside 1 .. E.
    """
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    if not layers:
        raise ValueError("found no router logits; expected one tensor [T, E] for each layer of experts")
    num_experts = layers[0].shape[-1]
    check_top_k(top_k, num_experts)
    if assignments is None or tokens is None:
        assignments, tokens = assignments_of(layers, top_k), sum(layer.shape[0] for layer in layers)
    probability = layers[0].new_zeros(num_experts, dtype=at_least_float32(layers[0]).dtype)
    for layer in layers:
        probability = probability + at_least_float32(layer).softmax(-1).sum(0).to(probability.device)
    return num_experts * (assignments.to(probability.dtype) * probability).sum() / tokens**2


@torch.no_grad()
def assignments_of(layers: Sequence[Tensor], top_k: int) -> Tensor:
    """How many tokens of all layers, logits [T, E] each, choose each expert: [E] int64."""
    assignments = layers[0].new_zeros(layers[0].shape[-1], dtype=torch.int64)
    for layer in layers:
        probabilities = at_least_float32(layer).softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten().to(assignments.device)
        assignments.scatter_add_(0, chosen, torch.ones_like(chosen))  # integers: the order does not matter
    return assignments


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small.

    logits [T, E]; the result is a scalar in float32 (float64 for float64 logits), nan without tokens.
    """
    return at_least_float32(logits).logsumexp(-1).square().mean()
