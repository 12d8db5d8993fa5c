"""Routing in a mixture of experts: which experts a token goes to, with what weights, and the router's losses.

    softmax (Shazeer et al., 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088):
        p = softmax(logits),  choose the k largest p,  weights = p / sum of the chosen p, or p itself
    softmax after top-k (Granite, gpt-oss):
        choose the k largest logits,  weights = softmax(chosen logits)
    sigmoid (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; GLM-4.5):
        s = sigmoid(logits),  choose by s + bias,  weights = scale * s / sum of the chosen s

Plain PyTorch on [T, E], in float32 (float64 for float64 logits), differentiable in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    softmax_after_top_k: bool = False,
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` of E experts for every token, and their weights.

    Args:
        logits: [T, E], any floating dtype; scores are computed in float32.
        score: "softmax" over all experts, or "sigmoid" of each.
        softmax_after_top_k: choose by the logits, and take the softmax of the chosen ones alone.
        renormalize: divide the weights by their sum over the chosen experts.
        correction_bias: [E], added to the scores for the choice alone; weights and gradients do not see it.
        num_groups, top_groups: consecutive experts form `num_groups` groups of one size, and only experts of
            the `top_groups` best are chosen; a group is as good as the sum of its two best scores.
        scale: multiplies the weights.

    Returns:
        weights [T, k] in float32 (float64 for float64 logits), and experts [T, k], int32, distinct in a row
        and in the order in which torch.topk has them: best first.

    Raises:
        ValueError: shapes or options that do not fit.
    """
    _check(logits, top_k, score, softmax_after_top_k, correction_bias, num_groups, top_groups)
    logits = at_least_float32(logits)
    scores = logits.sigmoid() if score == "sigmoid" else logits
    if score == "softmax" and not softmax_after_top_k:
        scores = logits.softmax(-1)
    with torch.no_grad():
        choice = scores if correction_bias is None else scores + correction_bias.to(scores.dtype)
        if top_groups < num_groups:
            choice = _best_groups_only(choice, num_groups, top_groups)
        experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if softmax_after_top_k:
        weights = weights.softmax(-1)
    elif renormalize:
        # Sigmoids may all underflow: then the weights are zero, not nan.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights if scale == 1.0 else weights * scale), experts.int()


def load_balancing_loss(logits: Tensor | Sequence[Tensor], top_k: int) -> Tensor:
    """Auxiliary loss for an even load (Switch Transformer, arXiv:2101.03961, equations 4 to 6).

        E * sum over e of (assignments to e / tokens) * (mean probability of e),   p = softmax(logits)

    Args:
        logits: [T, E], or one such tensor a layer: tokens of all layers are then counted together.
        top_k: experts a token, chosen by the logits; the loss of an even load is `top_k`.

    Returns:
        A scalar in float32 (float64 for float64 logits). Gradients flow through the probabilities alone.

    Raises:
        ValueError: no logits at all, or top_k outside 1 .. E.
    """
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    if not layers:
        raise ValueError("found no router logits; expected one tensor [T, E] for each layer of experts")
    num_experts = layers[0].shape[-1]
    _check_top_k(top_k, num_experts)
    tokens = sum(layer.shape[0] for layer in layers)
    assignments = layers[0].new_zeros(num_experts, dtype=torch.int64)
    probability = layers[0].new_zeros(num_experts, dtype=at_least_float32(layers[0]).dtype)
    for layer in layers:
        probabilities = at_least_float32(layer).softmax(-1)
        probability = probability + probabilities.sum(0).to(probability.device)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices.flatten().to(assignments.device)
        assignments.scatter_add_(0, chosen, torch.ones_like(chosen))  # integers: the order does not matter
    return num_experts * (assignments.to(probability.dtype) * probability).sum() / tokens**2


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2: it keeps logits small (ST-MoE, arXiv:2202.08906, equation 5).

    logits [T, E]; the result is a scalar in float32 (float64 for float64 logits), nan without tokens.
    """
    return at_least_float32(logits).logsumexp(-1).square().mean()


def _best_groups_only(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    grouped = choice.unflatten(-1, (num_groups, -1))  # [T, groups, E / groups]
    quality = grouped.topk(2, dim=-1).values.sum(-1)
    best = torch.zeros_like(quality, dtype=torch.bool)
    best.scatter_(-1, quality.topk(top_groups, dim=-1).indices, True)
    # Corrected scores may be negative: only -inf keeps every other expert behind.
    return grouped.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(-2)


def _check(
    logits: Tensor,
    top_k: int,
    score: str,
    softmax_after_top_k: bool,
    correction_bias: Tensor | None,
    num_groups: int,
    top_groups: int,
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits are {tuple(logits.shape)}; expected [tokens, experts]")
    num_experts = logits.shape[1]
    _check_top_k(top_k, num_experts)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {score!r}; expected 'softmax' or 'sigmoid'")
    if softmax_after_top_k and score != "softmax":
        raise ValueError("softmax_after_top_k takes the softmax of logits; expected score 'softmax'")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(f"correction_bias is {tuple(correction_bias.shape)}; expected ({num_experts},)")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups is {top_groups}; expected 1 to num_groups, {num_groups}")
    if top_groups < num_groups:
        size, rest = divmod(num_experts, num_groups)
        if rest or size < 2 or top_k > top_groups * size:
            raise ValueError(
                f"{num_groups} groups, of which {top_groups} are taken, do not fit {num_experts} experts, "
                f"{top_k} a token; expected groups of one size, of two experts or more, and enough of them"
            )


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; expected 1 to {num_experts}, the number of experts")
