"""One minus the cosine of logit rows s and t, scaled and capped as in `cross_entropy`, and its gradient.

    loss = 1 - cos(s, t),   dcos/ds = (t / |t| - cos s / |s|) / |s|

Norms below 1e-8 count as 1e-8 and have no gradient. The forward kernel reads both rows once, and once more to
write the gradient over the student's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import jit, next_power_of_2, on_device_of, tl, use_triton
from liger_models.kernels.losses._divergence_options import DivergenceOptions, row_arguments
from liger_models.kernels.losses._logit_tiles import cap_logits, load_columns, row_stride, scaled_logits

SMALLEST_LENGTH = 1e-8


def row_cosine_distances(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """One minus each row pair's cosine [N]; operands and gradient as in `row_divergences`."""
    if use_triton(student_logits, teacher_logits):
        rows, vocab = student_logits.shape
        losses = torch.zeros(rows, dtype=torch.float32, device=student_logits.device)
        arguments, flags = row_arguments(student_logits, teacher_logits, labels, options)
        block = min(next_power_of_2(vocab), _COSINE_BLOCK)
        with on_device_of(student_logits):
            _cosine_kernel[(rows,)](
                *arguments,
                losses,
                grad_scale,
                row_stride(grad_scale),
                **flags,
                SMALLEST=SMALLEST_LENGTH,
                BLOCK=block,
                num_warps=max(1, block // 256),
            )
        return losses
    student, cap_slope = cap_logits(student_logits, *options.student_scaling)
    teacher, _ = cap_logits(teacher_logits, *options.teacher_scaling)
    teacher = teacher.to(student.dtype)
    student_length = student.norm(dim=1, keepdim=True)
    student = student / student_length.clamp(min=SMALLEST_LENGTH)
    teacher = teacher / teacher.norm(dim=1, keepdim=True).clamp(min=SMALLEST_LENGTH)
    cosines = (student * teacher).sum(1, keepdim=True)
    ignored = False if labels is None else (labels == options.ignore_index).unsqueeze(1)
    ignored = torch.as_tensor(ignored, device=cosines.device)
    if grad_scale is not None:
        # A norm clamped to the minimum is a constant without gradient.
        slope = cosines.where(student_length > SMALLEST_LENGTH, 0.0) * student - teacher
        grad = slope * (grad_scale.unsqueeze(1) / student_length.clamp(min=SMALLEST_LENGTH))
        student_logits.copy_((grad * cap_slope).masked_fill(ignored, 0.0))
    return (1 - cosines).masked_fill(ignored, 0.0).squeeze(1)


# Chosen by reasoning, not measured: with 32 warps per pair of rows few pairs are in flight, so the L2 cache
# holds more of them for the second read.
_COSINE_BLOCK = 8192


@jit
def _cosine_kernel(
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
    losses_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. Given grad_scale, the gradient replaces the student's row. losses must be
    zeroed"""
    row = tl.program_id(0).to(tl.int64)
    student_row_ptr = student_ptr + row * student_stride
    teacher_row_ptr = teacher_ptr + row * teacher_stride
    grad_scale = 0.0
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
    counts = True
    if labels_ptr is not None:
        counts = tl.load(labels_ptr + row * labels_stride) != ignore_index
    product = tl.zeros([BLOCK], tl.float32)
    student_squares = tl.zeros([BLOCK], tl.float32)
    teacher_squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        student = load_columns(student_row_ptr, columns, vocab, True)
        teacher = load_columns(teacher_row_ptr, columns, vocab, True)
        student, _ = scaled_logits(student, scale, softcap, HAS_SOFTCAP, 1.0)
        teacher, _ = scaled_logits(teacher, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP, 1.0)
        product += student * teacher
        student_squares += student * student
        teacher_squares += teacher * teacher
    student_length = tl.sqrt(tl.sum(student_squares, 0))
    inverse = 1.0 / tl.maximum(student_length, SMALLEST)
    teacher_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(teacher_squares, 0)), SMALLEST)
    cosine = tl.sum(product, 0) * inverse * teacher_inverse
    tl.store(losses_ptr + row, 1.0 - cosine, mask=counts)
    if grad_scale_ptr is not None:
        # A norm clamped to the minimum is a constant without gradient.
        radial = tl.where(student_length > SMALLEST, cosine, 0.0) * inverse
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            student = load_columns(student_row_ptr, columns, vocab, True)
            teacher = load_columns(teacher_row_ptr, columns, vocab, True)
            student, slope = scaled_logits(student, scale, softcap, HAS_SOFTCAP, 1.0)
            teacher, _ = scaled_logits(teacher, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP, 1.0)
            grad = grad_scale * scale * inverse * (radial * student - teacher_inverse * teacher)
            if HAS_SOFTCAP:
                grad *= slope
            grad = tl.where(counts, grad, 0.0).to(student_ptr.dtype.element_ty)
            tl.store(student_row_ptr + columns, grad, mask=columns < vocab)
