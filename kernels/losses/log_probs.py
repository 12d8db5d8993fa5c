"""Scores of given tokens under rows of logits: the token's log-probability and, on request, properties of its
distribution.

For logits a and the label y of a row, let z = softcap * tanh(logit_scale * a / softcap) / T, p = softmax(z):

    log_prob = log p_y = z_y - lse,   entropy = H = - sum_c p_c log p_c
    is_top1 = whether y is the first of the largest logits,   log_sum_sq_probs = log sum_c p_c^2
    d log_prob / dz_c = [c = y] - p_c,   dH / dz_c = - p_c (log p_c + H)

WPO (Zhou et al., 2024) needs the sum of squares. _score_rows.py computes all scores in one pass over a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    once_differentiable,
    use_triton,
)
from liger_models.kernels.losses._logit_tiles import cap_logits
from liger_models.kernels.losses._reductions import check_label_dtype, check_labels
from liger_models.kernels.losses._score_rows import (
    ENTROPY,
    LOG_PROB,
    LOG_SUM_SQ,
    TOP1,
    RowOptions,
    first_largest,
    inverse_temperatures,
    row_options,
    row_scores,
    write_gradient,
)


class TokenScores(NamedTuple):
    """Scores of each label, [...] in float32 (float64 for float64 inputs), zero and False where the label is
    ignored; None where not requested.

    log_probs and entropy, in nats, have gradients; is_top1 (bool) and log_sum_sq_probs do not. weighted_sum,
    a 0-d tensor, is present if coefficients are given; it is then the only differentiable one.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    weighted_sum: Tensor | None = None


def log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    entropy: bool = False,
    top1: bool = False,
    log_sum_sq_probs: bool = False,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> TokenScores:
    """Scores of labels under logits.

    logits [..., V]; labels [...], int64 or int32, in [0, V) or equal to `ignore_index`. The temperature
    divides the logits last, after the scale and the cap: one number, or a tensor that broadcasts to the
    labels' shape, without a gradient.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options, IndexError for a label outside
    the vocabulary on a CPU. On a GPU such a label gives nan, as does a tensor's temperature that is not
    positive.
    """
    options = row_options(ignore_index, softcap, logit_scale, temperature, entropy, top1, log_sum_sq_probs)
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"found logits {list(logits.shape)} and labels {list(labels.shape)}; expected [..., V] and [...]"
        )
    check_label_dtype(labels)
    check_labels(labels, logits.shape[-1], ignore_index)
    inverse = inverse_temperatures(temperature, labels, at_least_float32(logits.new_empty(0)).dtype)
    if not use_triton(logits, labels):
        each = temperature.expand(labels.shape) if isinstance(temperature, Tensor) else 1.0
        scores = log_probs_plain(logits, labels, temperature=each, **options._asdict())
        as_once_differentiable(*(score for score in scores[:2] if score is not None))
        return scores
    return scores_of(_LogProbs.apply(as_rows(logits), labels.reshape(-1), options, inverse), labels.shape)


def log_probs_plain(
    logits: Tensor,
    labels: Tensor,
    *,
    entropy: bool = True,
    top1: bool = True,
    log_sum_sq_probs: bool = True,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> TokenScores:
    """Plain twin of `log_probs`."""
    z, _ = cap_logits(logits, logit_scale, softcap)
    each = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(z / each, -1)
    p = log_p.exp()
    valid = labels != ignore_index
    index = labels.where(valid, 0).long().unsqueeze(-1)
    return TokenScores(
        log_p.gather(-1, index).squeeze(-1).where(valid, 0.0),
        -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1).where(valid, 0.0) if entropy else None,
        first_largest(logits, logit_scale).eq(labels) & valid if top1 else None,
        (2 * log_p.detach()).logsumexp(-1).where(valid, 0.0) if log_sum_sq_probs else None,
    )


def scores_of(found: tuple[Tensor | None, ...], shape: torch.Size) -> TokenScores:
    """TokenScores of the given shape, from scores [T] or None and an optional weighted sum."""
    scores, weighted = found[:4], found[4:]
    return TokenScores(*(None if score is None else score.view(shape) for score in scores), *weighted)  # type: ignore[arg-type]


def wanted_scores(found: Tensor, options: RowOptions) -> tuple[Tensor | None, ...]:
    """log_probs, entropy, is_top1, log_sum_sq_probs [T] from found [5, T], as modifiable copies."""
    return (
        found[LOG_PROB].clone(),
        found[ENTROPY].clone() if options.entropy else None,
        found[TOP1] > 0 if options.top1 else None,
        found[LOG_SUM_SQ].clone() if options.log_sum_sq_probs else None,
    )


def mark_constants(ctx, scores: tuple[Tensor | None, ...]) -> None:
    """Mark the autograd function's outputs that have no gradient."""
    ctx.mark_non_differentiable(*(score for score in scores if score is not None))
    ctx.set_materialize_grads(False)


def upstream_gradients(
    found: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> list[Tensor]:
    """The two upstream gradients, contiguous, with zeros for an absent one."""
    rows = found.shape[1]
    return [found.new_zeros(rows) if g is None else g.contiguous() for g in (grad_log_probs, grad_entropy)]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options, inverse):
        found = row_scores(logits, labels, options, inverse=inverse)
        ctx.save_for_backward(logits, labels, found, inverse)
        ctx.options = options
        scores = wanted_scores(found, options)
        mark_constants(ctx, scores[2:])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        logits, labels, found, inverse = ctx.saved_tensors
        grad = logits.clone(memory_format=torch.contiguous_format)
        upstream = upstream_gradients(found, grad_log_probs, grad_entropy)
        write_gradient(grad, labels, found, *upstream, options=ctx.options, inverse=inverse)
        return grad, None, None, None
