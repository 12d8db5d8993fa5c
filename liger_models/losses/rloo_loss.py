"""RLOO (Ahmadian et al., 2024, arXiv:2402.14740): REINFORCE on whole answers with a leave-one-out baseline.

    loss = mean over answers of  - min(w A, clip(w, 1 - low, 1 + high) A),   w = p(answer) / p_old(answer)

with A from `rloo_advantages`. On fresh samples w is one, and the gradient is REINFORCE's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.losses.rows import check_sequences, mean_of


def rloo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    low: float = 0.2,
    high: float | None = None,
    num_items: Tensor | int | float | None = None,
) -> Tensor:
    """Mean loss of N answers, over these answers or over `num_items` (see losses/rows.py).

    log_probs and old_log_probs [N]: of the answers, from `sequence_log_probs`; the old ones default to the
    new. advantages [N]. high defaults to low.

    Raises:
        ValueError: incompatible shapes.
    """
    check_sequences(log_probs=log_probs, advantages=advantages, old_log_probs=old_log_probs)
    old = log_probs if old_log_probs is None else old_log_probs
    ratio = (log_probs - old.detach()).exp()
    bounded = ratio.clamp(1 - low, 1 + (low if high is None else high))
    return mean_of(-torch.minimum(ratio * advantages, bounded * advantages), num_items)
