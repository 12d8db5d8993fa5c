"""Supervised fine-tuning on scores: a weighted negative log-likelihood, or DFT.

    loss = - sum_t w_t log p_t / n,    DFT: w_t = p_t, constant (Wu et al., 2025, arXiv:2508.05629)

If the weights are known before the scores, `model.score(..., coefficients=weights)` computes the sum with up
to a quarter less work in the head; so does the model's own loss, without weights.
"""

from __future__ import annotations

from torch import Tensor

from liger_models.losses.rows import check_tokens


def sft_loss(
    log_probs: Tensor,
    counted: Tensor,
    *,
    weights: Tensor | None = None,
    dynamic: bool = False,
    num_items: Tensor | int | float | None = None,
) -> Tensor:
    """Loss of tokens [batch, seq], a scalar: the mean over the `counted` [batch, seq] ones of this call (at
    least one), or the sum over `num_items`, the whole step's labels on all ranks divided by the number of
    ranks.

    weights [batch, seq]: constant factors of the tokens. dynamic: DFT.

    Raises:
        ValueError: incompatible shapes.
    """
    check_tokens(log_probs, counted=counted, weights=weights)
    losses = -log_probs
    if dynamic:
        losses = losses * log_probs.detach().exp()
    if weights is not None:
        losses = losses * weights.detach()
    total = counted.sum().clamp(min=1) if num_items is None else num_items
    return (losses * counted).sum() / total
