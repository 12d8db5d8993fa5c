"""CPO (Xu et al., 2024, arXiv:2401.08417): DPO without a reference, plus the chosen sequence's likelihood.

loss = - log S(beta (log p(chosen) - log p(rejected))) + alpha nll                            (eq. 3 to 5)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.losses.dpo_loss import PreferenceLoss
from liger_models.losses.rows import check_sequences, mean_of


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    nll: Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | float | None = None,
) -> PreferenceLoss:
    """Mean loss of N pairs, over these pairs or over `num_items`, plus alpha times `nll`.

    Args:
        chosen, rejected: log-probabilities of the sequences, [N]; per token for "ipo".
        nll: the chosen sequences' negative log-likelihood, a scalar, a mean over tokens.
        loss_type: "sigmoid", "hinge" (SLiC: arXiv:2305.10425) or "ipo" (arXiv:2310.12036).
        label_smoothing: the probability that a pair's labels are swapped, for "sigmoid".

    Raises:
        ValueError: an unknown type, an invalid probability, or incompatible shapes.
    """
    return margin_loss(chosen, rejected, nll, loss_type, beta, 0.0, alpha, label_smoothing, num_items)


def margin_loss(
    chosen, rejected, nll, loss_type, beta, gamma, alpha, label_smoothing, num_items
) -> PreferenceLoss:
    """Loss of beta (chosen - rejected) - gamma."""
    check_sequences(chosen=chosen, rejected=rejected)
    if not 0 <= label_smoothing < 1 or (label_smoothing and loss_type != "sigmoid"):
        raise ValueError(
            f"label_smoothing is {label_smoothing} with loss_type={loss_type!r}; expected 0, or for sigmoid "
            "a number from 0 to below 1"
        )
    logits = beta * (chosen - rejected) - gamma
    if loss_type == "sigmoid":
        losses = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    elif loss_type == "hinge":
        losses = torch.relu(1 - logits)
    elif loss_type == "ipo":
        losses = (logits / beta - 1 / (2 * beta)) ** 2
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}; choose from sigmoid, hinge, ipo")
    loss = mean_of(losses, num_items)
    loss = loss if nll is None else loss + alpha * nll
    return PreferenceLoss(loss, beta * chosen.detach(), beta * rejected.detach())
