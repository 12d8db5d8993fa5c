"""KTO (Ethayarajh et al., 2024, arXiv:2402.01306): unpaired answers, each good or bad.

With r the log-ratio of an answer, z the KL divergence of policy and reference, S the logistic function:

    desirable: w (1 - S(beta (r - z))),   undesirable: w' (1 - S(beta (z - r)))                  (eq. 7, 8)

`apo_zero_unpaired` (D'Oosterlinck et al., 2024, arXiv:2408.06266, eq. 7) is the same with z = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.losses.rows import check_sequences, mean_of


class KTOLoss(NamedTuple):
    """The differentiable scalar loss, and beta times each answer's log-ratio [N], without gradient."""

    loss: Tensor
    rewards: Tensor


def kto_loss(
    log_probs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    num_items: Tensor | int | float | None = None,
) -> KTOLoss:
    """Mean loss of N answers, over these answers or over `num_items` (see losses/rows.py).

    Args:
        log_probs, reference: log-probabilities of the answers, [N]; the reference's have no gradient.
        desirable: whether each answer is good, [N] bool.
        kl: result of `kto_kl` for KTO; None for apo_zero_unpaired.

    Raises:
        ValueError: incompatible shapes, or `desirable` is not bool.
    """
    check_sequences(log_probs=log_probs, reference=reference, desirable=desirable)
    if desirable.dtype != torch.bool:
        raise ValueError(f"desirable is {desirable.dtype}; expected torch.bool, such as `labels > 0`")
    ratio = log_probs - reference.detach()
    beyond = ratio if kl is None else ratio - kl.detach()
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    losses = weights * torch.where(desirable, -beta * beyond, beta * beyond).sigmoid()
    return KTOLoss(mean_of(losses, num_items), beta * ratio.detach())


@torch.no_grad()
def kto_kl(log_probs: Tensor, reference: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """KL term z >= 0: the mean of log_probs - reference over all ranks' mismatched answers (answers to other
    prompts), [N] each, scored under torch.no_grad().

    The mean is over answers even if ranks have different numbers of them. All ranks must call this.

    Raises:
        ValueError: incompatible shapes.
    """
    check_sequences(log_probs=log_probs, reference=reference)
    total = torch.stack([(log_probs - reference).sum(), torch.full_like(log_probs.sum(), len(log_probs))])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
    return (total[0] / total[1].clamp(min=1)).clamp(min=0)
