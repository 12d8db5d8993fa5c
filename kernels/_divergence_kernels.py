"""The kernels under `divergence` and `linear_divergence`, which tell the formulas.

The forward kernel reads both rows twice, first for their log-sum-exps; given a scale it writes the gradient
over the student's row. The backward kernel writes the gradient elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels._logit_tiles import (
    fit_tile,
    fold_temperature,
    load_columns,
    row_lse2,
    row_stride,
    scaled_logits,
)


class DivergenceOptions(NamedTuple):
    """What a row's divergence depends on beside its two rows of logits and its label."""

    kind: str  # "forward_kl", "reverse_kl", "jsd", "total_variation", or linear_divergence's "cosine"
    ignore_index: int
    beta: float = 0.0
    temperature: float = 1.0
    softcap: float | None = None  # of the student's logits
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    @property
    def student_scaling(self) -> tuple[float, float | None]:
        """The scale and the cap that give the student's capped logits over the temperature."""
        return fold_temperature(self.logit_scale, self.softcap, self.temperature)

    @property
    def teacher_scaling(self) -> tuple[float, float | None]:
        """The same of the teacher."""
        return fold_temperature(self.teacher_logit_scale, self.teacher_softcap, self.temperature)


def launch_forward(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
    keep_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each row's divergence [N] and, for `launch_backward`, statistics [N, 3].

    Logits [N, V] with an inner stride of one; labels [N]; grad_scale [N] or [1], to write it times the
    gradient over the student's logits.
    """
    rows, vocab = student.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=student.device)
    statistics = losses.new_empty(rows, 3) if keep_statistics else None
    if rows and vocab:
        arguments, flags = row_arguments(student, teacher, labels, options)
        lanes, depth = fit_tile(vocab, _FORWARD_TILE)
        with on_device_of(student):
            _forward_kernel[(rows,)](
                *arguments,
                options.beta,
                losses,
                statistics,
                grad_scale,
                row_stride(grad_scale),
                KIND=options.kind,
                **flags,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),
            )
    return losses, statistics


def launch_backward(
    grad: Tensor,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    statistics: Tensor,
    grad_losses: Tensor,
) -> None:
    """Write the gradient of grad_losses * divergences into grad, contiguous [N, V]."""
    rows, vocab = student.shape
    if grad.numel():
        arguments, flags = row_arguments(student, teacher, labels, options)
        block = min(next_power_of_2(vocab), _BACKWARD_BLOCK)
        blocks = ceil_div(vocab, block)
        with on_device_of(student):
            _backward_kernel[(rows * blocks,)](
                *arguments,
                options.beta,
                grad,
                statistics,
                grad_losses,
                grad_losses.stride(0),
                blocks,
                KIND=options.kind,
                **flags,
                BLOCK=block,
                num_warps=max(1, block // 512),
            )


def row_arguments(student, teacher, labels, options):
    """The arguments that a kernel over rows of two begins with, and the flags that it is compiled for."""
    scale, cap = options.student_scaling
    teacher_scale, teacher_cap = options.teacher_scaling
    arguments = (
        student,
        teacher,
        labels,
        student.stride(0),
        teacher.stride(0),
        0 if labels is None else labels.stride(0),
        student.shape[1],
        options.ignore_index,
        scale,
        1.0 if cap is None else cap,
        teacher_scale,
        1.0 if teacher_cap is None else teacher_cap,
    )
    return arguments, {"HAS_SOFTCAP": cap is not None, "HAS_TEACHER_SOFTCAP": teacher_cap is not None}


# Chosen by reasoning, and not measured: rows are read twice, so few of them are to be in flight, for the L2
# cache to hold. With 32 warps a multiprocessor has one, and a depth of one keeps to their 64 registers.
_FORWARD_TILE = 8192, 1  # lanes, depth
_BACKWARD_BLOCK = 4096


@jit
def _terms(
    student_row_ptr,
    teacher_row_ptr,
    columns,
    vocab,
    student_lse2,
    teacher_lse2,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    KIND,
    HAS_SOFTCAP,
    HAS_TEACHER_SOFTCAP,
):
    """For some columns: q, q r, the divergence's terms, and the slope of the student's cap. What comes of a
    logarithm is divided by ln 2."""
    student = load_columns(student_row_ptr, columns, vocab, True)
    teacher = load_columns(teacher_row_ptr, columns, vocab, True)
    student, slope = scaled_logits(student, scale, softcap, HAS_SOFTCAP)
    teacher, _ = scaled_logits(teacher, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
    log_q = tl.where(columns < vocab, student - student_lse2, -float("inf"))
    log_p = tl.where(columns < vocab, teacher - teacher_lse2, -float("inf"))
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
    return q, qr, loss, slope


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
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    KIND,
    HAS_SOFTCAP,
    HAS_TEACHER_SOFTCAP,
):
    """The gradient of grad_loss * divergence for some columns of a row; in place if asked."""
    q, qr, _, slope = _terms(
        student_row_ptr,
        teacher_row_ptr,
        columns,
        vocab,
        student_lse2,
        teacher_lse2,
        scale,
        softcap,
        teacher_scale,
        teacher_softcap,
        beta,
        KIND,
        HAS_SOFTCAP,
        HAS_TEACHER_SOFTCAP,
    )
    factor = grad_loss * scale
    if KIND == "jsd" or KIND == "reverse_kl":
        factor *= 0.6931471805599453
    grad = factor * (qr - q * sum_of_qr)
    if HAS_SOFTCAP:
        grad *= slope
    tl.store(grad_row_ptr + columns, grad.to(grad_row_ptr.dtype.element_ty), mask=columns < vocab)


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
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    losses_ptr,
    statistics_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
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
    student_lse2 = row_lse2(student_row_ptr, vocab, scale, softcap, HAS_SOFTCAP, LANES, DEPTH)
    teacher_lse2 = row_lse2(
        teacher_row_ptr, vocab, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP, LANES, DEPTH
    )
    losses = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, DEPTH * LANES):
        _, qr, loss, _ = _terms(
            student_row_ptr,
            teacher_row_ptr,
            start + tile,
            vocab,
            student_lse2,
            teacher_lse2,
            scale,
            softcap,
            teacher_scale,
            teacher_softcap,
            beta,
            KIND,
            HAS_SOFTCAP,
            HAS_TEACHER_SOFTCAP,
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
                scale,
                softcap,
                teacher_scale,
                teacher_softcap,
                beta,
                KIND,
                HAS_SOFTCAP,
                HAS_TEACHER_SOFTCAP,
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
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    grad_ptr,
    statistics_ptr,
    grad_losses_ptr,
    grad_losses_stride,
    blocks,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
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
        scale,
        softcap,
        teacher_scale,
        teacher_softcap,
        beta,
        KIND,
        HAS_SOFTCAP,
        HAS_TEACHER_SOFTCAP,
    )
