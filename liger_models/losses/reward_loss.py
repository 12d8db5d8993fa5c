"""Reward modelling from preferences: the Bradley-Terry model on a value head (Ouyang et al., 2022,
arXiv:2203.02155, eq. 1), with margins (Llama 2: Touvron et al., 2023, arXiv:2307.09288, eq. 2) and rewards
centred around zero (Eisenstein et al., 2023, arXiv:2312.09244, eq. 2):

    loss = - log S(chosen - rejected - margin) + c (chosen + rejected)^2
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.losses.dpo_loss import PreferenceLoss
from liger_models.losses.rows import check_sequences, mean_of


def reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float | None = None,
    *,
    centering: float = 0.0,
    num_items: Tensor | int | float | None = None,
) -> PreferenceLoss:
    """Mean loss of N pairs, over these pairs or over `num_items` (see losses/rows.py).

    chosen, rejected: rewards of the sequences, [N], such as `logits[:, 0]` of a sequence classifier with one
    label. margin: minimum difference of the rewards, [N] or a number. centering: c in the formula.

    Raises:
        ValueError: incompatible shapes.
    """
    of_pairs = margin if isinstance(margin, Tensor) and margin.dim() else None
    check_sequences(chosen=chosen, rejected=rejected, margin=of_pairs)
    rewards, other = chosen.float(), rejected.float()
    losses = -logsigmoid(rewards - other if margin is None else rewards - other - margin)
    if centering:
        losses = losses + centering * (rewards + other) ** 2
    return PreferenceLoss(mean_of(losses, num_items), rewards.detach(), other.detach())
