"""Divergences between a student's and a teacher's next-token distributions, for distillation.

For a row of logits, scaled and capped as in `cross_entropy` on request, let q = softmax(student / T), p =
softmax(teacher / T), m = beta p + (1 - beta) q:

    generalized_jsd = beta KL(p || m) + (1 - beta) KL(q || m)      0 < beta < 1
                    = KL(p || q), the forward KL                   beta = 0
                    = KL(q || p), the reverse KL                   beta = 1
    total_variation = 1/2 sum_c |p_c - q_c|

    dloss/dstudent_c = q_c (r_c - sum_k q_k r_k) / T,   r_c = dloss/dq_c:
        (1 - beta) log(q_c / m_c),   -p_c / q_c,   log(q_c / p_c) + 1,   1/2 sign(q_c - p_c)

The teacher is a constant. Minimum traffic: five passes over a tensor of logits; the forward reads both, the
backward reads both and writes one. A KL divergence takes no more. The others read rows twice in the forward,
the second time after the log-sum-exps are known, partly from the L2 cache.

Source: Agarwal et al., "On-Policy Distillation of Language Models" (GKD, 2023), sections 2 and 3. Its JSD
vanishes as beta goes to 0 or 1; beta = 0 and 1 mean the two KL divergences instead, the limits after division
by beta and by 1 - beta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    contiguous_like,
    once_differentiable,
    use_triton,
)
from liger_models.kernels.losses._divergence_kernels import launch_backward, launch_forward
from liger_models.kernels.losses._divergence_options import DivergenceOptions
from liger_models.kernels.losses._logit_tiles import cap_logits, check_softcap, check_temperature
from liger_models.kernels.losses._reductions import check_label_dtype, check_reduction, mean_divisor


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of two next-token distributions, in nats, in float32 (float64 for
    a float64 student). beta 0 is KL(teacher || student), beta 1 is KL(student || teacher).

    student_logits and teacher_logits [..., V], any floating dtypes; log-probabilities are valid logits. Only
    the student has a gradient. logit_scale and softcap (for the student), teacher_logit_scale and
    teacher_softcap work as in `cross_entropy`; the shared temperature is applied after them. labels [...], if
    given, only select tokens: those whose label is not `ignore_index`.

    reduction "none" returns [...], "sum" the sum over tokens; "mean" divides it by `num_items` if given, else
    by the number of tokens (torch's "batchmean"), and is nan without tokens. A KL divergence is infinite
    where its second distribution is zero and its first is not. There is no factor of temperature^2.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options.
    """
    options = divergence_options(
        jsd_kind(beta),
        ignore_index,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


def kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """KL(teacher || student), as torch.nn.functional.kl_div(student_log_probs, teacher_probs): the forward
    KL. This is `generalized_jsd` with beta 0; see there for shapes, options and errors."""
    options = divergence_options(
        "forward_kl",
        ignore_index,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


def total_variation(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Half the sum of |p - q|, from 0 to 1. Shapes, options and errors as in `generalized_jsd`."""
    options = divergence_options(
        "total_variation",
        ignore_index,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


def jsd_kind(beta: float) -> str:
    """Kind of divergence for a beta; ValueError if beta is out of range."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")


def divergence_options(kind: str, ignore_index: int, **numbers: Any) -> DivergenceOptions:
    """DivergenceOptions as checked floats; ValueError if invalid."""
    numbers = {name: None if number is None else float(number) for name, number in numbers.items()}
    options = DivergenceOptions(kind, ignore_index, **numbers)
    check_temperature(options.temperature)
    check_softcap(options.softcap)
    check_softcap(options.teacher_softcap, "teacher_softcap")
    return options


def divergence_plain(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None, options: DivergenceOptions
) -> Tensor:
    """Plain twin of all three divergences, per row.  [N, V], [N, V], [N] -> [N]"""
    if labels is not None:
        valid = labels != options.ignore_index
        # First of all, so that rows without a label cannot affect the gradient, whatever they hold.
        student_logits = student_logits.masked_fill(~valid.unsqueeze(1), 0.0)
    log_q, log_p, _ = _log_probs(student_logits, teacher_logits, options)
    losses = _losses(log_q, log_p, options)
    return losses if labels is None else losses.where(valid, 0.0)


def row_divergences(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """Divergence of each row [N]. Given `grad_scale`, writes grad_scale times the gradient into `grad`, by
    default over the student's logits.

    Both logits and grad [N, V] with an inner stride of one; labels [N]; grad_scale [N] or [1], float32
    (float64 for float64 logits). grad is the student's logits, or shares no memory with them, or has half
    their element size and rows that begin where theirs do. Not differentiable.
    """
    if grad_scale is None:
        grad = None
    elif grad is None:
        grad = student_logits
    if use_triton(student_logits, teacher_logits):
        return launch_forward(student_logits, teacher_logits, labels, options, grad_scale, grad)[0]
    losses = divergence_plain(student_logits, teacher_logits, labels, options)
    if grad_scale is not None and grad is not None:
        log_q, log_p, slope = _log_probs(student_logits, teacher_logits, options)
        qr = _weighted_slopes(log_q, log_p, options)
        product = qr - log_q.exp() * qr.sum(1, keepdim=True)
        product *= grad_scale.unsqueeze(1) * slope
        if labels is not None:
            product = product.masked_fill((labels == options.ignore_index).unsqueeze(1), 0.0)
        grad.copy_(product)
    return losses


def _divergence(student_logits, teacher_logits, labels, options, reduction, num_items) -> Tensor:
    check_reduction(reduction, num_items)
    if student_logits.shape != teacher_logits.shape or student_logits.dim() < 1:
        raise ValueError(
            f"found the student's logits {list(student_logits.shape)} and the teacher's "
            f"{list(teacher_logits.shape)}; expected both [..., V], over one vocabulary"
        )
    shape = student_logits.shape[:-1]
    if labels is not None and labels.shape != shape:
        raise ValueError(f"labels have shape {list(labels.shape)}; expected one per token, {list(shape)}")
    student, teacher = as_rows(student_logits), as_rows(teacher_logits.detach())
    if labels is not None:
        check_label_dtype(labels)
        labels = labels.reshape(-1)
    if use_triton(student, teacher, labels):
        losses = _Divergence.apply(student, teacher, labels, options)
    else:
        losses = as_once_differentiable(divergence_plain(student, teacher, labels, options))
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / mean_divisor(labels, len(student), options.ignore_index, num_items, losses)


def _log_probs(student_logits, teacher_logits, options):
    """log q, log p and the derivative of q's logits, [N, V] in the student's precision or float32."""
    student, slope = cap_logits(student_logits, *options.student_scaling)
    teacher, _ = cap_logits(teacher_logits, *options.teacher_scaling)
    return torch.log_softmax(student, 1), torch.log_softmax(teacher.to(student.dtype), 1), slope


def _kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a log(a / b), zero where a is zero, whatever b is."""
    a = log_a.exp()
    return a * (log_a - log_b).masked_fill(a == 0, 0.0)


def _log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    mixture = beta * log_p.exp() + (1 - beta) * log_q.exp()
    return mixture.masked_fill(mixture == 0, 1.0).log()  # where it is zero, both weights are


def _losses(log_q: Tensor, log_p: Tensor, options: DivergenceOptions) -> Tensor:
    """[N, V], [N, V] -> [N]"""
    if options.kind == "forward_kl":
        terms = _kl_terms(log_p, log_q)
    elif options.kind == "reverse_kl":
        terms = _kl_terms(log_q, log_p)
    elif options.kind == "jsd":
        log_m = _log_mixture(log_q, log_p, options.beta)
        terms = options.beta * _kl_terms(log_p, log_m) + (1 - options.beta) * _kl_terms(log_q, log_m)
    else:
        terms = 0.5 * (log_p.exp() - log_q.exp()).abs()
    return terms.sum(1)


def _weighted_slopes(log_q: Tensor, log_p: Tensor, options: DivergenceOptions) -> Tensor:
    """q_c r_c of the module's formula, [N, V]. A constant in r cancels in the gradient."""
    if options.kind == "forward_kl":
        return -log_p.exp()
    if options.kind == "reverse_kl":
        return _kl_terms(log_q, log_p)
    if options.kind == "jsd":
        return (1 - options.beta) * _kl_terms(log_q, _log_mixture(log_q, log_p, options.beta))
    q = log_q.exp()
    return 0.5 * q * torch.sign(q - log_p.exp())


class _Divergence(torch.autograd.Function):
    """Divergence of each row, with one kernel in each direction."""

    @staticmethod
    def forward(ctx, student, teacher, labels, options):
        losses, statistics = launch_forward(student, teacher, labels, options, keep_statistics=True)
        ctx.save_for_backward(student, teacher, labels, statistics)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_losses):
        student, teacher, labels, statistics = ctx.saved_tensors
        grad = contiguous_like(student)
        launch_backward(grad, student, teacher, labels, ctx.options, statistics, grad_losses)
        return grad, None, None, None
