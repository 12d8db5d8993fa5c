"""Random routing to two experts per token in training: SparseMixer-v2 (Liu et al., 2024, arXiv:2409.12136),
as in Phi-3.5-MoE.

For a token's logits s [E], m the largest among the candidates, and jitter j:

    near   = the experts with (m - s_e) / max(|s_e|, m) <= 2 j
    p      = softmax of s over the near experts
    expert = argmax over them of s_e,                in evaluation
             argmax over them of s_e - log(n_e),     in training, n_e exponentially distributed: a draw from
                                                     p (Gumbel)
    weight = p_expert,                               in evaluation
             h p_expert,                             in training, h = 1 for the most probable expert, and for
                                                     others for one draw in four, else 1/3 (Heun's method)

The second expert is chosen in the same way among all but the first. The gradient is that of p_expert, without
h; this estimate is unbiased up to third order, and costs no more than the router's logits.

The router is in layers/experts/router.py. Random numbers and near experts are decided once: a layer
recomputed in the backward pass reuses them (layers/sequences/routing_decisions.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

THIRD, REST = 0.3333, 0.6667  # as published: h is 0.3333, or 0.3333 + 0.6667
SKIPPED = 0.75  # of draws of experts other than the most probable


Draws = list[tuple[Tensor, Tensor]]


def draw_noise(logits: Tensor) -> Draws:
    """Draw exponential [T, E] and uniform [T, 1] random numbers for each of the two choices, from torch's
    generator of the logits' device.
    """
    return [(torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1])) for _ in range(2)]


def decide(scores: Tensor, jitter: float, draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
    """Choose from scores [T, E]: experts [T, 2] int32, factors [T, 2], near [T, 2, E] bool. Without draws, as
    in evaluation.
    """
    left, experts, factors, nears = scores, [], [], []
    for i in range(2):
        best, expert = left.max(-1, keepdim=True)
        far = (best - scores) / torch.maximum(scores.abs(), best) > 2 * jitter
        near = ~far & (left > -torch.inf)
        factor = torch.ones_like(best)
        if draws is not None:
            exponential, uniform = draws[i]
            pool = left.masked_fill(~near, -torch.inf)
            most_probable = expert
            expert = (pool - exponential.log()).max(-1, keepdim=True).indices
            whole = (expert == most_probable) | (uniform > SKIPPED)
            factor = THIRD + REST * whole.to(scores.dtype)
        left = left.scatter(-1, expert, -torch.inf)
        experts.append(expert)
        factors.append(factor)
        nears.append(near)
    return torch.cat(experts, -1).int(), torch.cat(factors, -1), torch.stack(nears, 1)


def weigh(scores: Tensor, experts: Tensor, factors: Tensor, near: Tensor) -> Tensor:
    """Weights [T, 2] of a decision, differentiable in the scores [T, E]."""
    shares = scores[:, None].masked_fill(~near, -torch.inf).softmax(-1)  # [T, 2, E]
    weights = shares.gather(-1, experts.long()[..., None])[..., 0]
    return weights + (factors - 1) * weights.detach()
