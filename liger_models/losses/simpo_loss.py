"""SimPO (Meng et al., 2024, arXiv:2405.14734): log-probabilities per token, a target margin, no reference.

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
    """Mean loss of N pairs, over these pairs or over `num_items`, plus alpha times `nll` if given
    (CPO-SimPO).

    chosen, rejected: log-probabilities per token, [N]: `sequence_log_probs` divided by the sequence's number
    of labels. gamma: target margin of the rewards. label_smoothing: the probability that a pair's labels are
    swapped.

    Raises:
        ValueError: an invalid label_smoothing, or incompatible shapes.
    """
    return margin_loss(chosen, rejected, nll, "sigmoid", beta, gamma, alpha, label_smoothing, num_items)
