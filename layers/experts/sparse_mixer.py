"""Two experts a token, drawn at random in training: SparseMixer-v2 (Liu et al., 2024, arXiv:2409.12136), as
Phi-3.5-MoE has it.

With logits s [E] of a token, m the largest of those that can still be chosen, and j the jitter:

    near   = the experts with (m - s_e) / max(|s_e|, m) <= 2 j
    p      = softmax of s over the near experts
    expert = argmax over them of s_e,                in evaluation
             argmax over them of s_e - log(n_e),     in training, n_e from the exponential distribution: so
                                                     it is a draw from p (Gumbel)
    weight = p_expert,                               in evaluation
             h p_expert,                             in training, h = 1 for the most probable expert, of the
                                                     others for one draw in four, else 1/3 (Heun's method)

The second expert is chosen in the same way among all but the first. The gradient is that of p_expert, without
h: so estimated, it is right in the mean up to the third order. It costs no more than the router's logits.

The router that chooses so is in layers/experts/moe.py. What is random here, and which experts are near, is
decided once: a layer that runs again in the backward pass takes it from its first run
(layers/sequences/routing_decisions.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

THIRD, REST = 0.3333, 0.6667  # as published: h is 0.3333, or 0.3333 + 0.6667
SKIPPED = 0.75  # of draws of an expert that is not the most probable


class InputNoise(nn.Module):
    """x [T, H] -> x times numbers from 1 - noise to 1 + noise, in training."""

    def __init__(self, noise: float):
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty_like(x).uniform_(1.0 - self.noise, 1.0 + self.noise)

    def extra_repr(self) -> str:
        return f"{self.noise}"


Draws = list[tuple[Tensor, Tensor]]


def draw_noise(logits: Tensor) -> Draws:
    """For each of the two choices, exponential numbers [T, E] and uniform ones [T, 1], from torch's generator
    of the logits' device.
    """
    return [(torch.empty_like(logits).exponential_(), torch.rand_like(logits[:, :1])) for _ in range(2)]


def decide(scores: Tensor, jitter: float, draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
    """From scores [T, E]: experts [T, 2] int32, factors [T, 2], near [T, 2, E] bool. Without draws, as in
    evaluation.
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
    """Weights [T, 2] of what was decided, differentiable in the scores [T, E]."""
    shares = scores[:, None].masked_fill(~near, -torch.inf).softmax(-1)  # [T, 2, E]
    weights = shares.gather(-1, experts.long()[..., None])[..., 0]
    return weights + (factors - 1) * weights.detach()
