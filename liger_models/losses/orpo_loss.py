"""ORPO (Hong et al., 2024, arXiv:2403.07691): likelihood of the chosen sequence, and the odds of both.

    loss = nll - beta log S(log odds(chosen) - log odds(rejected)),   odds(y) = p(y) / (1 - p(y))

with p(y) the geometric mean of the tokens' probabilities, eq. 4 to 7. It needs no reference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.losses.dpo_loss import PreferenceLoss
from liger_models.losses.rows import check_sequences, mean_of


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    nll: Tensor,
    *,
    beta: float = 0.1,
    num_items: Tensor | int | float | None = None,
) -> PreferenceLoss:
    """`nll` plus the mean odds loss of N pairs, over the pairs here or over `num_items`.

    Args:
        chosen, rejected: log-probabilities by token, [N]: `sequence_log_probs` over the sequence's count of
            labels.
        nll: the negative log-likelihood, a scalar, which the paper takes over the chosen sequences with their
            prompts, a mean over tokens.
        beta: the weight of the odds, the paper's lambda.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_sequences(chosen=chosen, rejected=rejected)
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    loss = nll - beta * mean_of(logsigmoid(log_odds), num_items)
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, in each of its halves in the form that does not cancel."""
    small = x < -math.log(2)
    # What is not chosen must not be infinite: its gradient, zero times infinity, would be nan.
    return torch.where(small, (-x.where(small, -1.0).exp()).log1p(), (-x.where(~small, -0.5).expm1()).log())
