"""ORPO (Hong et al., 2024, arXiv:2403.07691): the chosen sequence's likelihood, and the odds ratio.

    loss = nll - beta log S(log odds(chosen) - log odds(rejected)),   odds(y) = p(y) / (1 - p(y))

with p(y) the geometric mean of the tokens' probabilities, eq. 4 to 7. No reference model.
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
    """`nll` plus the mean odds-ratio loss of N pairs, over these pairs or over `num_items`.

    Args:
        chosen, rejected: log-probabilities per token, [N]: `sequence_log_probs` divided by the sequence's
            number of labels.
        nll: the negative log-likelihood, a scalar, a mean over tokens; in the paper, of the chosen sequences
            with their prompts.
        beta: weight of the odds-ratio term, the paper's lambda.

    Raises:
        ValueError: incompatible shapes.
    """
    check_sequences(chosen=chosen, rejected=rejected)
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    loss = nll - beta * mean_of(logsigmoid(log_odds), num_items)
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, in a form without cancellation for each half of the range."""
    small = x < -math.log(2)
    # The unselected branch must be finite: its gradient, zero times infinity, would be nan.
    return torch.where(small, (-x.where(small, -1.0).exp()).log1p(), (-x.where(~small, -0.5).expm1()).log())
