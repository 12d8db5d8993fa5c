"""Kernels of `divergence` and `linear_divergence`, whose files have the formulas, and their launches.

The forward kernel reads both rows once for a KL divergence (`_kl_sums.py`), and twice for other divergences,
first for the log-sum-exps. Given a scale it reads them once more and writes the gradient, possibly over the
student's row. The backward kernel writes the gradient elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels.losses._divergence_options import DivergenceOptions, row_arguments
from liger_models.kernels.losses._divergence_terms import log_probs, losses_and_slopes, write_gradient
from liger_models.kernels.losses._kl_sums import kl_sums
from liger_models.kernels.losses._logit_tiles import fit_tile, row_lse2, row_stride


def launch_forward(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
    grad: Tensor | None = None,
    keep_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Divergence [N] of each row, and statistics [N, 3] for `launch_backward`.

    Logits [N, V] with an inner stride of one; labels [N]; grad_scale [N] or [1]: write it times the gradient
    into grad [N, V] with an inner stride of one. grad is the student's logits, or shares no memory with them,
    or has half their element size and rows that begin where theirs do.
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


# Lanes and depth, chosen on an H200 at a vocabulary of 128,256 in bfloat16. The sums of a KL divergence take
# one read, at 98% of a copy's bandwidth. The others read rows twice, and two rows per program exceed the L2
# cache, so the number of loads in flight decides.
_KL_TILE = 1024, 2
_FORWARD_TILE = 2048, 2
_BACKWARD_BLOCK = 4096


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
    """Compute the losses of one row per program. `losses` must be zero before."""
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
        teacher_lse2, student_lse2, loss = kl_sums(
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
        student_lse2, teacher_lse2, loss = kl_sums(
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
        # Backwards: the rows' ends were read last and are most likely still cached.
        tiles = tl.cdiv(vocab, DEPTH * LANES)
        for done in range(0, tiles):
            columns = (tiles - 1 - done) * (DEPTH * LANES) + tile
            log_q, log_p, _ = log_probs(
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
            loss, qr = losses_and_slopes(log_q, log_p, beta, KIND)
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
            write_gradient(
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
    """One program per block of a row, of `blocks`; grad is contiguous [N, V]."""
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
    write_gradient(
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
