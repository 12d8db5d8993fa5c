"""The kernels under `divergence` and `linear_divergence`, which tell the formulas.

The forward kernel reads both rows once for a KL divergence, whose sum it gathers beside the normalizers:

    sum_c a_c log(a_c / b_c) = sum_c a_c (y_c - z_c) - log(Y / Z)

where y and z are the logits, each less its row's largest, Y and Z the sums of their exponentials, a is
exp(y) / Y and b is exp(z) / Z. For other divergences it reads them twice, first for the log-sum-exps. Given a
scale it reads them once more and writes the gradient where it is told, which may be over the student's row.
The backward kernel writes the gradient elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels.losses._logit_tiles import (
    fast_log2,
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
    grad: Tensor | None = None,
    keep_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each row's divergence [N] and, for `launch_backward`, statistics [N, 3].

    Logits [N, V] with an inner stride of one; labels [N]; grad_scale [N] or [1], to write it times the
    gradient into grad [N, V] with an inner stride of one, which is the student's logits, or shares no memory
    with them, or is one of half their element size whose rows begin where theirs do.
    """
    rows, vocab = student.shape
    losses = torch.zeros(rows, dtype=torch.float32, device=student.device)
    statistics = losses.new_empty(rows, 3) if keep_statistics else None
    if rows and vocab:
        arguments, flags = row_arguments(student, teacher, labels, options)
        lanes, depth = fit_tile(
            vocab, _KL_TILE if options.kind in ("forward_kl", "reverse_kl") else _FORWARD_TILE
        )
        with on_device_of(student):
            _forward_kernel[(rows,)](
                *arguments,
                options.beta,
                losses,
                statistics,
                grad_scale,
                row_stride(grad_scale),
                grad,
                0 if grad is None else grad.stride(0),
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


# Lanes and depth, chosen on an H200 at a vocabulary of 128,256 in bfloat16. The sums of a KL divergence take
# one read, at 98% of a copy's bandwidth. For the others rows are read twice, and two rows of every program
# are more than the L2 cache holds: what counts is how many loads are in flight.
_KL_TILE = 1024, 2
_FORWARD_TILE = 2048, 2
_BACKWARD_BLOCK = 4096


@jit
def _log_probs(
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
    KIND,
    HAS_SOFTCAP,
    HAS_TEACHER_SOFTCAP,
    MASKED,
):
    """log2 q, log2 p, and the slope of the student's cap. Beyond the row both logarithms are of zero."""
    student = load_columns(student_row_ptr, columns, vocab, MASKED)
    teacher = load_columns(teacher_row_ptr, columns, vocab, MASKED)
    student, slope = scaled_logits(student, scale, softcap, HAS_SOFTCAP)
    teacher, _ = scaled_logits(teacher, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
    log_q, log_p = student - student_lse2, teacher - teacher_lse2
    if MASKED:
        log_q = tl.where(columns < vocab, log_q, -float("inf"))
        log_p = tl.where(columns < vocab, log_p, -float("inf"))
    if KIND == "jsd":
        # Below the least float32 at any rate, and differences of two of them are finite. A nan stays one.
        log_q = tl.maximum(log_q, -10000.0, propagate_nan=tl.PropagateNan.ALL)
        log_p = tl.maximum(log_p, -10000.0, propagate_nan=tl.PropagateNan.ALL)
    return log_q, log_p, slope


@jit
def _mixture(log_q, log_p, beta):
    """Of the larger of p and q: log2(m / larger), m / larger, and the share of the smaller in it; and how far
    apart log2 p and log2 q are.
    """
    # From the larger of the two, which neither over- nor underflows.
    distance = tl.abs(log_p - log_q)
    p_is_larger = log_p > log_q
    small = tl.where(p_is_larger, 1.0 - beta, beta) * tl.exp2(-distance)
    m = tl.where(p_is_larger, beta, 1.0 - beta) + small
    return fast_log2(m), m, small, distance


@jit
def _losses_and_slopes(log_q, log_p, beta, KIND):
    """The terms of a JSD or a total variation, and q r, whose logarithms are divided by ln 2."""
    if KIND == "jsd":
        log_m, m, small, distance = _mixture(log_q, log_p, beta)
        loss = -tl.exp2(tl.maximum(log_q, log_p)) * (m * log_m + small * distance)
        qr = (beta - 1.0) * tl.exp2(log_q) * (log_m + tl.maximum(log_p - log_q, 0.0))
    else:
        q, p = tl.exp2(log_q), tl.exp2(log_p)
        loss = 0.5 * tl.abs(p - q)
        qr = 0.5 * q * tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    return loss, qr


@jit
def _logit_gradient(log_q, log_p, sum_of_qr, beta, KIND):
    """q r - q sum_of_qr, whose logarithms are divided by ln 2."""
    q = tl.exp2(log_q)
    if KIND == "forward_kl":
        grad = q - tl.exp2(log_p)
    elif KIND == "reverse_kl":
        # A product with a zero probability is zero, also where the logarithm beside it is infinite.
        grad = tl.where(q == 0.0, 0.0, q * (log_q - log_p - sum_of_qr))
    elif KIND == "jsd":
        log_m, _m, _small, _distance = _mixture(log_q, log_p, beta)
        grad = q * ((beta - 1.0) * (log_m + tl.maximum(log_p - log_q, 0.0)) - sum_of_qr)
    else:
        p = tl.exp2(log_p)
        grad = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - sum_of_qr)
    return grad


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
    log_q, log_p, slope = _log_probs(
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
        KIND,
        HAS_SOFTCAP,
        HAS_TEACHER_SOFTCAP,
        True,
    )
    factor = grad_loss * scale
    if KIND == "jsd" or KIND == "reverse_kl":
        factor *= 0.6931471805599453
    grad = factor * _logit_gradient(log_q, log_p, sum_of_qr, beta, KIND)
    if HAS_SOFTCAP:
        grad *= slope
    if grad_row_ptr.dtype.element_ty != student_row_ptr.dtype.element_ty:
        # Narrower gradients over wider logits: they end before those of the next tiles begin, but may cover
        # those of this one that another thread is still to read.
        tl.debug_barrier()
    tl.store(grad_row_ptr + columns, grad.to(grad_row_ptr.dtype.element_ty), mask=columns < vocab)


@jit
def _take_pair(
    y_max,
    y_sum,
    z_max,
    z_sum,
    products,
    y_row_ptr,
    z_row_ptr,
    columns,
    vocab,
    y_scale,
    y_softcap,
    z_scale,
    z_softcap,
    Y_HAS_SOFTCAP,
    Z_HAS_SOFTCAP,
    MASKED,
):
    """Take columns [DEPTH, THREADS, WIDTH] into what each thread keeps: the largest y and z, the sums of the
    exponentials of y and z less these, and the sum of exp2(y) (y - z) of the same."""
    y, _ = scaled_logits(load_columns(y_row_ptr, columns, vocab, MASKED), y_scale, y_softcap, Y_HAS_SOFTCAP)
    z, _ = scaled_logits(load_columns(z_row_ptr, columns, vocab, MASKED), z_scale, z_softcap, Z_HAS_SOFTCAP)
    if MASKED:
        y = tl.where(columns < vocab, y, -float("inf"))
        z = tl.where(columns < vocab, z, -float("inf"))
    larger_y = tl.maximum(y_max, tl.max(tl.max(y, 2), 0))
    larger_z = tl.maximum(z_max, tl.max(tl.max(z, 2), 0))
    y -= _finite(larger_y)[None, :, None]
    z -= _finite(larger_z)[None, :, None]
    y_sum, z_sum, products = _shift_sums(y_max, y_sum, z_max, z_sum, products, larger_y, larger_z)
    e = tl.exp2(y)
    # A product with a zero probability is zero, also where the difference beside it is infinite.
    products += tl.sum(tl.sum(tl.where(e == 0.0, 0.0, e * (y - z)), 2), 0)
    y_sum += tl.sum(tl.sum(e, 2), 0)
    z_sum += tl.sum(tl.sum(tl.exp2(z), 2), 0)
    return larger_y, y_sum, larger_z, z_sum, products


@jit
def _finite(maximum):
    """What to subtract from logits: while all of them are -inf, zero. exp2(-inf - -inf) would be nan."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@jit
def _shift_sums(y_max, y_sum, z_max, z_sum, products, larger_y, larger_z):
    """The three sums of logits less other maxima."""
    rescale = tl.exp2(y_max - _finite(larger_y))
    change = (_finite(y_max) - _finite(larger_y)) - (_finite(z_max) - _finite(larger_z))
    products = tl.where(rescale == 0.0, 0.0, rescale * (products + y_sum * change))
    return y_sum * rescale, z_sum * tl.exp2(z_max - _finite(larger_z)), products


@jit
def _kl_sums(
    y_row_ptr,
    z_row_ptr,
    vocab,
    y_scale,
    y_softcap,
    z_scale,
    z_softcap,
    Y_HAS_SOFTCAP,
    Z_HAS_SOFTCAP,
    LANES,
    DEPTH,
):
    """log2 of the sums of exp(y) and exp(z), and KL(softmax(y) || softmax(z)) / ln 2, in one read."""
    # Five numbers are kept for each thread, and not for each lane, which would fill the registers.
    WIDTH: tl.constexpr = 8 if LANES >= 8 else LANES  # which a thread loads at a time in half precision
    THREADS: tl.constexpr = LANES // WIDTH
    lane = tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tile = tl.arange(0, DEPTH)[:, None, None] * LANES + lane[None, :, :]
    whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
    y_max = tl.full([THREADS], -float("inf"), tl.float32)
    z_max = tl.full([THREADS], -float("inf"), tl.float32)
    y_sum = tl.zeros([THREADS], tl.float32)
    z_sum = tl.zeros([THREADS], tl.float32)
    products = tl.zeros([THREADS], tl.float32)
    for start in range(0, whole, DEPTH * LANES):
        y_max, y_sum, z_max, z_sum, products = _take_pair(
            y_max,
            y_sum,
            z_max,
            z_sum,
            products,
            y_row_ptr,
            z_row_ptr,
            start + tile,
            vocab,
            y_scale,
            y_softcap,
            z_scale,
            z_softcap,
            Y_HAS_SOFTCAP,
            Z_HAS_SOFTCAP,
            False,
        )
    if whole < vocab:
        y_max, y_sum, z_max, z_sum, products = _take_pair(
            y_max,
            y_sum,
            z_max,
            z_sum,
            products,
            y_row_ptr,
            z_row_ptr,
            whole + tile,
            vocab,
            y_scale,
            y_softcap,
            z_scale,
            z_softcap,
            Y_HAS_SOFTCAP,
            Z_HAS_SOFTCAP,
            True,
        )
    y_largest, z_largest = tl.max(y_max, 0), tl.max(z_max, 0)
    y_sum, z_sum, products = _shift_sums(y_max, y_sum, z_max, z_sum, products, y_largest, z_largest)
    total = tl.sum(y_sum, 0)
    y_log2, z_log2 = tl.log2(total), tl.log2(tl.sum(z_sum, 0))
    return y_largest + y_log2, z_largest + z_log2, tl.sum(products, 0) / total - (y_log2 - z_log2)


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
    grad_ptr,
    grad_stride,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program a row.  losses, zero before"""
    row = tl.program_id(0).to(tl.int64)
    student_row_ptr = student_ptr + row * student_stride
    teacher_row_ptr = teacher_ptr + row * teacher_stride
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    ignored = False
    if labels_ptr is not None:
        ignored = tl.load(labels_ptr + row * labels_stride) == ignore_index
    if ignored:
        if grad_ptr is not None:
            for start in range(0, vocab, DEPTH * LANES):
                zeros = tl.zeros([DEPTH, LANES], grad_ptr.dtype.element_ty)
                tl.store(grad_ptr + row * grad_stride + start + tile, zeros, mask=start + tile < vocab)
        return
    if KIND == "forward_kl":
        teacher_lse2, student_lse2, loss = _kl_sums(
            teacher_row_ptr,
            student_row_ptr,
            vocab,
            teacher_scale,
            teacher_softcap,
            scale,
            softcap,
            HAS_TEACHER_SOFTCAP,
            HAS_SOFTCAP,
            LANES,
            DEPTH,
        )
        sum_of_qr = -1.0
    elif KIND == "reverse_kl":
        student_lse2, teacher_lse2, loss = _kl_sums(
            student_row_ptr,
            teacher_row_ptr,
            vocab,
            scale,
            softcap,
            teacher_scale,
            teacher_softcap,
            HAS_SOFTCAP,
            HAS_TEACHER_SOFTCAP,
            LANES,
            DEPTH,
        )
        sum_of_qr = loss
    else:
        student_lse2 = row_lse2(student_row_ptr, vocab, scale, softcap, HAS_SOFTCAP, LANES, DEPTH)
        teacher_lse2 = row_lse2(
            teacher_row_ptr, vocab, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP, LANES, DEPTH
        )
        losses = tl.zeros([LANES], tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        # From the rows' ends, which were read last and are likeliest to be in the cache.
        tiles = tl.cdiv(vocab, DEPTH * LANES)
        for done in range(0, tiles):
            columns = (tiles - 1 - done) * (DEPTH * LANES) + tile
            log_q, log_p, _ = _log_probs(
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
                KIND,
                HAS_SOFTCAP,
                HAS_TEACHER_SOFTCAP,
                True,
            )
            loss, qr = _losses_and_slopes(log_q, log_p, beta, KIND)
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
    if grad_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
        for start in range(0, vocab, DEPTH * LANES):
            _write_gradient(
                grad_ptr + row * grad_stride,
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
