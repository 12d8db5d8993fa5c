"""RLOO (Ahmadian et al., 2024, arXiv:2402.14740): REINFORCE with a leave-one-out baseline, of whole answers.

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
    """The mean loss of N answers, over those here or over `num_items` (see losses/rows.py).

    log_probs and old_log_probs [N]: of the answers, as `sequence_log_probs` gives them; the old ones are by
    default the new. advantages [N]. high is low by default.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_sequences(log_probs=log_probs, advantages=advantages, old_log_probs=old_log_probs)
    old = log_probs if old_log_probs is None else old_log_probs
    ratio = (log_probs - old.detach()).exp()
    bounded = ratio.clamp(1 - low, 1 + (low if high is None else high))
    return mean_of(-torch.minimum(ratio * advantages, bounded * advantages), num_items)
