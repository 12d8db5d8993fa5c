"""Divergences between a student's and a teacher's next-token distributions, for distillation.

For a row of logits, let q = softmax(student / T), p = softmax(teacher / T), m = beta p + (1 - beta) q:

    generalized_jsd = beta KL(p || m) + (1 - beta) KL(q || m)      0 < beta < 1
                    = KL(p || q), the forward KL                   beta = 0
                    = KL(q || p), the reverse KL                   beta = 1
    total_variation = 1/2 sum_c |p_c - q_c|

    dloss/dstudent_c = q_c (r_c - sum_k q_k r_k) / T,   r_c = dloss/dq_c:
        (1 - beta) log(q_c / m_c),   -p_c / q_c,   log(q_c / p_c) + 1,   1/2 sign(q_c - p_c)

The teacher is a constant. The fewest bytes that must move are five passes over a tensor of logits: the
forward reads both, the backward reads both and writes one. A row's second reading in the forward, once its
two log-sum-exps are known, is meant to find it in the L2 cache.

Source: Agarwal et al., "On-Policy Distillation of Language Models" (GKD, 2023), sections 2 and 3. Its JSD
goes to zero with beta and with 1 - beta; the two KL divergences, which those limits divided by beta and by
1 - beta are, stand in their place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    as_rows,
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    use_triton,
)
from liger_models.kernels.cross_entropy import _accumulate, _load, _stride, loss_denominator


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of two next-token distributions, in nats, in float32 (float64 for
    a float64 student). beta 0 is KL(teacher || student), beta 1 is KL(student || teacher).

    student_logits and teacher_logits [..., V], any floating dtypes; log-probabilities are logits too. Only
    the student has a gradient. labels [...], if given, only say which tokens count: those whose label is
    not `ignore_index`. reduction "none" gives [...], "sum" the sum over tokens; "mean" divides it by
    `num_items` if given, else by the count of tokens (torch's "batchmean"), and is nan if there is none. A
    KL divergence is infinite where its second distribution is zero and its first is not. There is no
    factor of temperature^2.

    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    """
    options = jsd_options(beta, temperature, ignore_index)
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


def kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """KL(teacher || student), as torch.nn.functional.kl_div(student_log_probs, teacher_probs) has it: the
    forward KL, `generalized_jsd` with beta 0, where shapes, options and errors are told."""
    options = jsd_options(0.0, temperature, ignore_index)
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


def total_variation(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
) -> Tensor:
    """Half the sum of |p - q|, from 0 to 1. Shapes, options and errors are those of `generalized_jsd`."""
    _check_temperature(temperature)
    options = DivergenceOptions("total_variation", 0.0, float(temperature), ignore_index)
    return _divergence(student_logits, teacher_logits, labels, options, reduction, num_items)


class DivergenceOptions(NamedTuple):
    """What a row's divergence depends on beside its two rows of logits and its label."""

    kind: str  # "forward_kl", "reverse_kl", "jsd" or "total_variation"
    beta: float
    temperature: float
    ignore_index: int


def jsd_options(beta: float, temperature: float, ignore_index: int) -> DivergenceOptions:
    """The options of `generalized_jsd`, checked: ValueError."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    _check_temperature(temperature)
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")
    return DivergenceOptions(kind, float(beta), float(temperature), ignore_index)


def divergence_plain(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None, options: DivergenceOptions
) -> Tensor:
    """The plain twin of all three: each row's divergence.  [N, V], [N, V], [N] -> [N]"""
    if labels is not None:
        valid = labels != options.ignore_index
        # Before anything else, so that no row without a label, whatever it holds, reaches the gradient.
        student_logits = student_logits.masked_fill(~valid.unsqueeze(1), 0.0)
    log_q, log_p = _log_probs(student_logits, teacher_logits, options)
    losses = _losses(log_q, log_p, options)
    return losses if labels is None else losses.where(valid, 0.0)


def row_divergences(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Each row's divergence [N]; given `grad_scale`, it times the gradient is written over the student.

    Both logits [N, V] with an inner stride of one; labels [N]; grad_scale [N] or [1], float32 (float64 for
    float64 logits). Not differentiable.
    """
    if use_triton(student_logits, teacher_logits):
        return _launch_forward(student_logits, teacher_logits, labels, options, grad_scale)[0]
    losses = divergence_plain(student_logits, teacher_logits, labels, options)
    if grad_scale is not None:
        log_q, log_p = _log_probs(student_logits, teacher_logits, options)
        qr = _weighted_slopes(log_q, log_p, options)
        grad = qr - log_q.exp() * qr.sum(1, keepdim=True)
        grad *= (grad_scale / options.temperature).unsqueeze(1)
        if labels is not None:
            grad = grad.masked_fill((labels == options.ignore_index).unsqueeze(1), 0.0)
        student_logits.copy_(grad)
    return losses


def mean_divisor(
    labels: Tensor | None, tokens: int, ignore_index: int, num_items: int | Tensor | None, like: Tensor
) -> Tensor:
    """What reduction="mean" divides by, as a tensor of like's device and dtype without dimensions."""
    if labels is None and num_items is None:
        return like.new_full((), tokens)
    counted = like.new_empty(0) if labels is None else labels
    return loss_denominator(counted, ignore_index, None, None, num_items, like.dtype)


def check_reduction(reduction: str, num_items: int | Tensor | None) -> None:
    """Raise ValueError for a reduction that there is not, or for a divisor that it does not use."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides only reduction='mean'; drop it for reduction={reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items has shape {list(num_items.shape)}; expected one number")


def _divergence(student_logits, teacher_logits, labels, options, reduction, num_items) -> Tensor:
    check_reduction(reduction, num_items)
    if student_logits.shape != teacher_logits.shape or student_logits.dim() < 1:
        raise ValueError(
            f"found the student's logits {list(student_logits.shape)} and the teacher's "
            f"{list(teacher_logits.shape)}; expected both [..., V], of one vocabulary"
        )
    shape = student_logits.shape[:-1]
    if labels is not None and labels.shape != shape:
        raise ValueError(f"labels have shape {list(labels.shape)}; expected one a token, {list(shape)}")
    student, teacher = as_rows(student_logits), as_rows(teacher_logits.detach())
    if labels is not None:
        labels = labels.reshape(-1)
    if use_triton(student, teacher, labels):
        losses = _Divergence.apply(student, teacher, labels, options)
    else:
        losses = divergence_plain(student, teacher, labels, options)
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / mean_divisor(labels, len(student), options.ignore_index, num_items, losses)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")


def _log_probs(student_logits, teacher_logits, options):
    """log q and log p of the rows, [N, V] in the student's precision, which is float32 at least."""
    student = at_least_float32(student_logits)
    teacher = at_least_float32(teacher_logits).to(student.dtype)
    inverse = 1.0 / options.temperature
    return torch.log_softmax(student * inverse, 1), torch.log_softmax(teacher * inverse, 1)


def _kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a log(a / b), zero where a is, whatever b is."""
    a = log_a.exp()
    return a * (log_a - log_b).masked_fill(a == 0, 0.0)


def _log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    mixture = beta * log_p.exp() + (1 - beta) * log_q.exp()
    return mixture.masked_fill(mixture == 0, 1.0).log()  # where it is zero, so are both its weights


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
    """q_c r_c of the formula at the head, [N, V]. A constant in r cancels in the gradient."""
    if options.kind == "forward_kl":
        return -log_p.exp()
    if options.kind == "reverse_kl":
        return _kl_terms(log_q, log_p)
    if options.kind == "jsd":
        return (1 - options.beta) * _kl_terms(log_q, _log_mixture(log_q, log_p, options.beta))
    q = log_q.exp()
    return 0.5 * q * torch.sign(q - log_p.exp())


class _Divergence(torch.autograd.Function):
    """Each row's divergence, from one kernel forward and one backward."""

    @staticmethod
    def forward(ctx, student, teacher, labels, options):
        losses, statistics = _launch_forward(student, teacher, labels, options, keep_statistics=True)
        ctx.save_for_backward(student, teacher, labels, statistics)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_losses):
        student, teacher, labels, statistics = ctx.saved_tensors
        grad = torch.empty_like(student, memory_format=torch.contiguous_format)
        rows, vocab = student.shape
        if grad.numel():
            block = min(next_power_of_2(vocab), _BACKWARD_BLOCK)
            blocks = ceil_div(vocab, block)
            with on_device_of(student):
                _backward_kernel[(rows * blocks,)](
                    *_common(student, teacher, labels, ctx.options),
                    grad,
                    statistics,
                    grad_losses,
                    grad_losses.stride(0),
                    blocks,
                    KIND=ctx.options.kind,
                    BLOCK=block,
                    num_warps=max(1, block // 512),
                )
        return grad, None, None, None


def _launch_forward(student, teacher, labels, options, grad_scale=None, keep_statistics=False):
    rows, vocab = student.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=student.device)
    statistics = losses.new_empty(rows, 3) if keep_statistics else None
    if rows and vocab:
        lanes = min(next_power_of_2(vocab), _FORWARD_TILE[0])
        depth = min(next_power_of_2(ceil_div(vocab, lanes)), _FORWARD_TILE[1])
        with on_device_of(student):
            _forward_kernel[(rows,)](
                *_common(student, teacher, labels, options),
                losses,
                statistics,
                grad_scale,
                _stride(grad_scale),
                KIND=options.kind,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),
            )
    return losses, statistics


def _common(student, teacher, labels, options):
    """The arguments that both kernels begin with."""
    return (
        student,
        teacher,
        labels,
        student.stride(0),
        teacher.stride(0),
        0 if labels is None else labels.stride(0),
        student.shape[1],
        options.ignore_index,
        1.0 / options.temperature,
        options.beta,
    )


_FORWARD_TILE = 4096, 2  # lanes, depth
_BACKWARD_BLOCK = 4096


@jit
def row_lse2(row_ptr, vocab, logit_scale, softcap, HAS_SOFTCAP, LANES, DEPTH):
    """log2 of the sum of exp(z) over a row, in one read; z as in `cross_entropy`."""
    # Each lane keeps its own maximum and sum, so that no thread waits for another before the row's end.
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
    maximum = tl.full([LANES], -float("inf"), tl.float32)
    normalizer = tl.zeros([LANES], tl.float32)
    for start in range(0, whole, DEPTH * LANES):
        maximum, normalizer, _ = _accumulate(
            maximum,
            normalizer,
            0.0,
            row_ptr,
            start + tile,
            None,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            False,
            False,
        )
    if whole < vocab:
        maximum, normalizer, _ = _accumulate(
            maximum,
            normalizer,
            0.0,
            row_ptr,
            whole + tile,
            None,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            False,
            True,
        )
    largest = tl.max(maximum, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest + tl.log2(tl.sum(normalizer * tl.exp2(maximum - shift), 0))


@jit
def _terms(
    student_row_ptr,
    teacher_row_ptr,
    columns,
    vocab,
    student_lse2,
    teacher_lse2,
    inverse_temperature,
    beta,
    KIND,
):
    """For some columns: q, q r, and the divergence's terms, those of a logarithm divided by ln 2."""
    scale = inverse_temperature * 1.4426950408889634
    log_q = _load(student_row_ptr, columns, vocab, True) * scale - student_lse2
    log_p = _load(teacher_row_ptr, columns, vocab, True) * scale - teacher_lse2
    log_q = tl.where(columns < vocab, log_q, -float("inf"))
    log_p = tl.where(columns < vocab, log_p, -float("inf"))
    # A product with a zero probability is zero, also where the logarithm beside it is infinite or nan.
    if KIND == "jsd":
        # The logarithm of the mixture from the larger of the two, which neither over- nor underflows.
        p_is_larger = log_p > log_q
        larger = tl.where(p_is_larger, log_p, log_q)
        ratio = tl.exp2(-tl.abs(log_p - log_q))
        high = tl.exp2(larger)
        low = tl.where(high > 0.0, high * ratio, 0.0)
        p = tl.where(p_is_larger, high, low)
        q = tl.where(p_is_larger, low, high)
        log_m = larger + tl.log2(
            tl.where(p_is_larger, beta + (1.0 - beta) * ratio, 1.0 - beta + beta * ratio)
        )
        qr = tl.where(q > 0.0, (1.0 - beta) * q * (log_q - log_m), tl.where(q == 0.0, 0.0, q))
        loss = qr + tl.where(p > 0.0, beta * p * (log_p - log_m), tl.where(p == 0.0, 0.0, p))
    else:
        q, p = tl.exp2(log_q), tl.exp2(log_p)
        if KIND == "forward_kl":
            loss = tl.where(p == 0.0, 0.0, p * (log_p - log_q))
            qr = -p
        elif KIND == "reverse_kl":
            loss = tl.where(q == 0.0, 0.0, q * (log_q - log_p))
            qr = loss
        else:
            loss = 0.5 * tl.abs(p - q)
            qr = 0.5 * q * tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    return q, qr, loss


@jit
def _write_gradient(
    grad_row_ptr,
    student_row_ptr,
    teacher_row_ptr,
    columns,
    vocab,
    student_lse2,
    teacher_lse2,
    sum_of_qr,
    grad_loss,
    inverse_temperature,
    beta,
    KIND,
):
    """The gradient of grad_loss * divergence for some columns of a row; in place if asked."""
    q, qr, _ = _terms(
        student_row_ptr,
        teacher_row_ptr,
        columns,
        vocab,
        student_lse2,
        teacher_lse2,
        inverse_temperature,
        beta,
        KIND,
    )
    scale = grad_loss * inverse_temperature
    if KIND == "jsd" or KIND == "reverse_kl":
        scale *= 0.6931471805599453
    grad = (scale * (qr - q * sum_of_qr)).to(grad_row_ptr.dtype.element_ty)
    tl.store(grad_row_ptr + columns, grad, mask=columns < vocab)


@jit
def _forward_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    student_stride,
    teacher_stride,
    labels_stride,
    vocab,
    ignore_index,
    inverse_temperature,
    beta,
    losses_ptr,
    statistics_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program a row. Given grad_scale, the gradient replaces the student's row.  losses, zero before"""
    row = tl.program_id(0).to(tl.int64)
    student_row_ptr = student_ptr + row * student_stride
    teacher_row_ptr = teacher_ptr + row * teacher_stride
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    ignored = False
    if labels_ptr is not None:
        ignored = tl.load(labels_ptr + row * labels_stride) == ignore_index
    if ignored:
        if grad_scale_ptr is not None:
            for start in range(0, vocab, DEPTH * LANES):
                zeros = tl.zeros([DEPTH, LANES], student_ptr.dtype.element_ty)
                tl.store(student_row_ptr + start + tile, zeros, mask=start + tile < vocab)
        return
    student_lse2 = row_lse2(student_row_ptr, vocab, inverse_temperature, 1.0, False, LANES, DEPTH)
    teacher_lse2 = row_lse2(teacher_row_ptr, vocab, inverse_temperature, 1.0, False, LANES, DEPTH)
    losses = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, DEPTH * LANES):
        _, qr, loss = _terms(
            student_row_ptr,
            teacher_row_ptr,
            start + tile,
            vocab,
            student_lse2,
            teacher_lse2,
            inverse_temperature,
            beta,
            KIND,
        )
        losses += tl.sum(loss, 0)
        sums += tl.sum(qr, 0)
    loss = tl.sum(losses, 0)
    sum_of_qr = tl.sum(sums, 0)
    if KIND != "total_variation":
        loss *= 0.6931471805599453
    tl.store(losses_ptr + row, loss)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + row * 3, student_lse2)
        tl.store(statistics_ptr + row * 3 + 1, teacher_lse2)
        tl.store(statistics_ptr + row * 3 + 2, sum_of_qr)
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
        for start in range(0, vocab, DEPTH * LANES):
            _write_gradient(
                student_row_ptr,
                student_row_ptr,
                teacher_row_ptr,
                start + tile,
                vocab,
                student_lse2,
                teacher_lse2,
                sum_of_qr,
                grad_scale,
                inverse_temperature,
                beta,
                KIND,
            )


@jit
def _backward_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    student_stride,
    teacher_stride,
    labels_stride,
    vocab,
    ignore_index,
    inverse_temperature,
    beta,
    grad_ptr,
    statistics_ptr,
    grad_losses_ptr,
    grad_losses_stride,
    blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row, of `blocks`; grad is contiguous [N, V]."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    grad_row_ptr = grad_ptr + row * vocab
    ignored = False
    if labels_ptr is not None:
        ignored = tl.load(labels_ptr + row * labels_stride) == ignore_index
    if ignored:
        zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + columns, zeros, mask=columns < vocab)
        return
    _write_gradient(
        grad_row_ptr,
        student_ptr + row * student_stride,
        teacher_ptr + row * teacher_stride,
        columns,
        vocab,
        tl.load(statistics_ptr + row * 3),
        tl.load(statistics_ptr + row * 3 + 1),
        tl.load(statistics_ptr + row * 3 + 2),
        tl.load(grad_losses_ptr + row * grad_losses_stride),
        inverse_temperature,
        beta,
        KIND,
    )
