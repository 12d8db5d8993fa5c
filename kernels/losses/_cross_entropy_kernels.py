"""Kernels of `cross_entropy` and `linear_cross_entropy`, whose files have the formulas.

The forward kernel reads a row once and returns its loss and log-sum-exp. On request it also finds the largest
logit, which takes a second read (from the L2 cache), and writes the gradient over the row. The backward
kernel writes the gradient elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl
from liger_models.kernels.losses._logit_tiles import (
    fit_tile,
    load_columns,
    row_argmax,
    row_stride,
    row_sums,
    scaled_logits,
)


class LossOptions(NamedTuple):
    """Parameters of a row's loss apart from its logits, its label and the class weights."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float


def launch_forward(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    *,
    grad_scale: Tensor | None = None,
    grad_lse: Tensor | None = None,
    labels_ok: Tensor | None = None,
    predict: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss and log-sum-exp of each row and, with `predict`, the column of its largest logit (-1 without a
    label).

    logits [N, C] with an inner stride of one; labels [N]. grad_scale [N] or [1]: overwrite the logits with it
    times the loss's gradient, plus grad_lse, contiguous [N], times the log-sum-exp's. labels_ok, one int32,
    is set to zero if a label is outside the vocabulary.
    """
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    predicted = torch.empty(rows, dtype=torch.int64, device=logits.device) if predict else None
    if rows:
        arguments, flags = _common(logits, labels, class_weight, options)
        lanes, depth = fit_tile(vocab, _LOSS_TILE if grad_scale is None else _GRADIENT_TILE)
        # Every option needs registers: at full depth 32 warps would run out of them.
        weighs_columns = flags["HAS_SMOOTHING"] and class_weight is not None
        depth = max(depth >> (sum(flags.values()) + weighs_columns), 1)
        with on_device_of(logits):
            _forward_kernel[(rows,)](
                *arguments,
                losses,
                lse,
                labels_ok,
                grad_scale,
                row_stride(grad_scale),
                grad_lse,
                predicted,
                **flags,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),  # a thread loads 16 bytes of half precision at a time
            )
    return losses, lse, predicted


def launch_backward(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    lse: Tensor,
    grad_losses: Tensor,
    grad_lse: Tensor | None,
) -> None:
    """Write the gradient of grad_losses * losses + grad_lse * lse into grad, contiguous [N, C]."""
    rows, vocab = logits.shape
    if rows:
        block = min(next_power_of_2(vocab), _BACKWARD_BLOCK)
        blocks = ceil_div(vocab, block)
        arguments, flags = _common(logits, labels, class_weight, options)
        with on_device_of(logits):
            _backward_kernel[(rows * blocks,)](
                *arguments,
                grad,
                lse,
                grad_losses,
                grad_lse,
                row_stride(grad_losses),
                row_stride(grad_lse),
                blocks,
                **flags,
                BLOCK=block,
                num_warps=max(1, block // 512),
            )


def _common(logits, labels, class_weight, options):
    """Leading arguments and compile-time flags of both kernels."""
    smoothing = float(options.label_smoothing)
    weight_sum = class_weight.sum(dtype=torch.float32) if class_weight is not None and smoothing else None
    arguments = (
        logits,
        labels,
        None if class_weight is None else class_weight.contiguous(),
        weight_sum,
        logits.stride(0),
        labels.stride(0),
        logits.shape[1],
        options.ignore_index,
        smoothing,
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if options.softcap is None else float(options.softcap),
    )
    return arguments, {"HAS_SOFTCAP": options.softcap is not None, "HAS_SMOOTHING": smoothing != 0.0}


# Chosen on an H200 at a vocabulary of 128,256 in bfloat16. The first tile reads logits at 98% of a copy's
# bandwidth. The second, with 32 warps, keeps so few rows in flight that the L2 cache holds them: overwriting
# them with the gradient takes 11% less than three passes. The backward kernel reaches 95%.
_LOSS_TILE = 1024, 8  # lanes, depth
_GRADIENT_TILE = 8192, 4
_BACKWARD_BLOCK = 4096


@jit
def _label_weight(class_weight_ptr, label):
    weight = 1.0
    if class_weight_ptr is not None:
        weight = tl.load(class_weight_ptr + label).to(tl.float32)
    return weight


@jit
def _total_weight(class_weight_sum_ptr, vocab):
    return vocab * 1.0 if class_weight_sum_ptr is None else tl.load(class_weight_sum_ptr)


@jit
def _gradient(
    a,
    columns,
    class_weight_ptr,
    class_weight_sum_ptr,
    label,
    label_weight,
    lse,
    grad_loss,
    grad_lse,
    vocab,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
    MASKED,
):
    """Gradient of grad_loss * loss + grad_lse * lse for logits a of some columns of a row. If label is None,
    no column is the label's."""
    z, slope = scaled_logits(a, logit_scale, softcap, HAS_SOFTCAP)
    grad_loss *= logit_scale
    factor = grad_loss * label_weight * (1.0 - smoothing + 2.0 * z_loss * lse) + grad_lse * logit_scale
    if HAS_SMOOTHING:
        spread = grad_loss * smoothing / vocab
        factor += spread * _total_weight(class_weight_sum_ptr, vocab)
    grad = factor * tl.exp2(z - lse * 1.4426950408889634)
    if HAS_SMOOTHING:
        if class_weight_ptr is not None:
            spread *= load_columns(class_weight_ptr, columns, vocab, MASKED)
        grad -= spread
    if label is not None:
        grad = tl.where(columns == label, grad - grad_loss * label_weight * (1.0 - smoothing), grad)
    if HAS_SOFTCAP:
        grad *= slope
    return grad


@jit
def _overwrite(
    row_ptr,
    columns,
    class_weight_ptr,
    class_weight_sum_ptr,
    label_weight,
    lse,
    grad_loss,
    grad_lse,
    vocab,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
    MASKED,
):
    """Overwrite the logits of some columns, none of them the label's, with their gradient."""
    grad = _gradient(
        load_columns(row_ptr, columns, vocab, MASKED),
        columns,
        class_weight_ptr,
        class_weight_sum_ptr,
        None,
        label_weight,
        lse,
        grad_loss,
        grad_lse,
        vocab,
        smoothing,
        z_loss,
        logit_scale,
        softcap,
        HAS_SOFTCAP,
        HAS_SMOOTHING,
        MASKED,
    ).to(row_ptr.dtype.element_ty)
    if MASKED:
        tl.store(row_ptr + columns, grad, mask=columns < vocab)
    else:
        tl.store(row_ptr + columns, grad)


@jit
def _forward_kernel(
    logits_ptr,
    labels_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    labels_stride,
    vocab,
    ignore_index,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    losses_ptr,
    lse_ptr,
    labels_ok_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    grad_lse_ptr,
    predicted_ptr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program per row. Given grad_scale, the gradient replaces the row while it is in the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row * labels_stride)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if predicted_ptr is not None:
            tl.store(predicted_ptr + row, -1)
        if grad_scale_ptr is not None:
            for start in range(0, vocab, LANES):
                columns = start + tl.arange(0, LANES)
                zeros = tl.zeros([LANES], row_ptr.dtype.element_ty)
                tl.store(row_ptr + columns, zeros, mask=columns < vocab)
        return
    # A label outside the vocabulary must not be read; its loss becomes nan below.
    inside = (label >= 0) & (label < vocab)
    label = tl.where(inside, label, 0)
    if labels_ok_ptr is not None:
        tl.store(labels_ok_ptr, 0, mask=inside == 0)
    # Read before anything overwrites it.
    label_a = tl.load(row_ptr + label).to(tl.float32)
    label_logit, _ = scaled_logits(label_a, logit_scale, softcap, HAS_SOFTCAP)
    label_weight = _label_weight(class_weight_ptr, label)

    lse2, weighted_sum = row_sums(
        row_ptr,
        class_weight_ptr,
        vocab,
        logit_scale,
        softcap,
        HAS_SOFTCAP,
        HAS_SMOOTHING,
        LANES,
        DEPTH,
    )
    lse = lse2 * 0.6931471805599453

    loss = label_weight * (1.0 - smoothing) * (lse2 - label_logit) * 0.6931471805599453
    if z_loss != 0.0:  # 0 * lse^2 would be nan if the square overflows
        loss += label_weight * z_loss * lse * lse
    if HAS_SMOOTHING:
        total_weight = _total_weight(class_weight_sum_ptr, vocab)
        loss += smoothing / vocab * (total_weight * lse2 - tl.sum(weighted_sum, 0)) * 0.6931471805599453
    tl.store(losses_ptr + row, tl.where(inside, loss, float("nan")))
    tl.store(lse_ptr + row, lse)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, row_argmax(row_ptr, vocab, logit_scale, LANES))
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
        grad_lse = 0.0
        if grad_lse_ptr is not None:
            grad_lse = tl.load(grad_lse_ptr + row)
        tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
        for start in range(0, whole, DEPTH * LANES):
            _overwrite(
                row_ptr,
                start + tile,
                class_weight_ptr,
                class_weight_sum_ptr,
                label_weight,
                lse,
                grad_scale,
                grad_lse,
                vocab,
                smoothing,
                z_loss,
                logit_scale,
                softcap,
                HAS_SOFTCAP,
                HAS_SMOOTHING,
                False,
            )
        if whole < vocab:
            _overwrite(
                row_ptr,
                whole + tile,
                class_weight_ptr,
                class_weight_sum_ptr,
                label_weight,
                lse,
                grad_scale,
                grad_lse,
                vocab,
                smoothing,
                z_loss,
                logit_scale,
                softcap,
                HAS_SOFTCAP,
                HAS_SMOOTHING,
                True,
            )
        # Checking for the label and masking in all columns would double the loop's instructions.
        grad = _gradient(
            label_a,
            label,
            class_weight_ptr,
            class_weight_sum_ptr,
            label,
            label_weight,
            lse,
            grad_scale,
            grad_lse,
            vocab,
            smoothing,
            z_loss,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
            True,
        )
        tl.debug_barrier()  # another thread wrote this element
        tl.store(row_ptr + label, grad.to(row_ptr.dtype.element_ty))


@jit
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    labels_stride,
    vocab,
    ignore_index,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    grad_ptr,
    lse_ptr,
    grad_losses_ptr,
    grad_lse_ptr,
    grad_losses_stride,
    grad_lse_stride,
    blocks,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row, of `blocks`; grad is contiguous [N, C]."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row * labels_stride)
    grad_row_ptr = grad_ptr + row * vocab
    if label == ignore_index:
        zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + columns, zeros, mask=columns < vocab)
        return
    grad_lse = 0.0
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + row * grad_lse_stride)
    grad = _gradient(
        load_columns(logits_ptr + row * logits_stride, columns, vocab, True),
        columns,
        class_weight_ptr,
        class_weight_sum_ptr,
        label,
        _label_weight(class_weight_ptr, label),
        tl.load(lse_ptr + row),
        tl.load(grad_losses_ptr + row * grad_losses_stride),
        grad_lse,
        vocab,
        smoothing,
        z_loss,
        logit_scale,
        softcap,
        HAS_SOFTCAP,
        HAS_SMOOTHING,
        True,
    )
    tl.store(grad_row_ptr + columns, grad.to(grad_ptr.dtype.element_ty), mask=columns < vocab)
