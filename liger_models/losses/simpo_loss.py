"""SimPO (Meng et al., 2024, arXiv:2405.14734): log-probabilities by token, a target margin, no reference.

loss = - log S(beta (log p(chosen) / |chosen| - log p(rejected) / |rejected|) - gamma)            (eq. 6)
"""

from __future__ import annotations

from torch import Tensor

from liger_models.losses.cpo_loss import margin_loss
from liger_models.losses.dpo_loss import PreferenceLoss


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    nll: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | float | None = None,
) -> PreferenceLoss:
    """The mean loss of N pairs, over the pairs here or over `num_items`; with `nll`, plus alpha times that
    (CPO-SimPO).

    chosen, rejected: log-probabilities by token, [N]: `sequence_log_probs` over the sequence's count of
    labels. gamma: the margin of the rewards that is aimed at. label_smoothing: the probability that a pair is
    the wrong way round.

    Raises:
        ValueError: a label_smoothing that is no probability, or shapes that do not fit.
    """
    return margin_loss(chosen, rejected, nll, "sigmoid", beta, gamma, alpha, label_smoothing, num_items)
