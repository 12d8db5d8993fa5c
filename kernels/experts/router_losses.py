"""Router losses of a mixture of experts, in plain PyTorch.

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
        logits: [T, E], or one such tensor per layer; tokens of all layers are then counted together.
        top_k: experts per token, chosen by the logits; an even load has the loss `top_k`.
        assignments, tokens: [E] and a number, counted over a larger batch that contains these logits. The
            loss is then this part's share, and the parts' losses add up to the batch's.

    Returns:
        A scalar in float32 (float64 for float64 logits). Only the probabilities have gradients.

    Raises:
        ValueError: no logits, or top_k outside 1 .. E.
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
    """Number of tokens that choose each expert, over all layers' logits [T, E]: [E] int64."""
    assignments = layers[0].new_zeros(layers[0].shape[-1], dtype=torch.int64)
    for layer in layers:
        probabilities = at_least_float32(layer).softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten().to(assignments.device)
        assignments.scatter_add_(0, chosen, torch.ones_like(chosen))  # integers: order-independent
    return assignments


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small.

    logits [T, E]; the result is a scalar in float32 (float64 for float64 logits), nan without tokens.
    """
    return at_least_float32(logits).logsumexp(-1).square().mean()
