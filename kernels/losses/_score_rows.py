"""Scores of logit rows, and their gradient, which overwrites the logits.

With z, p, lse and H as in log_probs.py, m the largest z so far, and n, s, q the sums of e, e (z - m), e^2 for
e = exp(z - m), all rebased when m grows (Milakov and Gimelshein, 2018, for n), one pass over a row gives all
of its scores:

    lse = m + log n,   H = log n - s / n,   log_sum_sq_probs = log q - 2 log n

Both terms of H are non-negative, so nothing cancels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, jit, next_power_of_2, on_device_of, tl, use_triton
from liger_models.kernels.losses._logit_tiles import (
    cap_logits,
    check_softcap,
    check_temperature,
    check_temperatures,
    fit_tile,
    fold_temperature,
    load_columns,
    scaled_logits,
)


class RowOptions(NamedTuple):
    """Parameters of a row's scores apart from its logits and label, with the temperature folded in, and the
    scores to compute."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    entropy: bool
    top1: bool
    log_sum_sq_probs: bool


def row_options(
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    temperature: float | Tensor,
    entropy: bool,
    top1: bool,
    log_sum_sq_probs: bool,
) -> RowOptions:
    """Check the options and fold a temperature of all rows into them; ValueError if they are invalid."""
    shared = 1.0 if isinstance(temperature, Tensor) else temperature
    check_temperature(shared)
    check_softcap(softcap)
    scale, cap = fold_temperature(logit_scale, softcap, shared)
    return RowOptions(ignore_index, cap, scale, bool(entropy), bool(top1), bool(log_sum_sq_probs))


def inverse_temperatures(temperature: float | Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
    """1 / temperature of each row [N], given a tensor of the labels' shape or one that broadcasts to it; None
    for a number. One that is not positive gives nan.

    Raises:
        TypeError: a tensor that requires a gradient.
        ValueError: another shape, or on a CPU a temperature that is not positive.
    """
    if not isinstance(temperature, Tensor):
        return None
    check_temperatures(temperature)
    try:
        rows = temperature.to(labels.device, dtype).expand(labels.shape).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"temperature has the shape {list(temperature.shape)}; expected {list(labels.shape)}, as labels"
        ) from None
    return torch.where(rows > 0, 1 / rows, float("nan"))


# Rows of the result of `row_scores`.
LOG_PROB, LSE, ENTROPY, LOG_SUM_SQ, TOP1 = range(5)


def row_scores(
    logits: Tensor,
    labels: Tensor,
    options: RowOptions,
    coefficients: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """Scores of each row, [5, N]: see `LOG_PROB` and so on. Given `coefficients` [N], overwrites the logits
    with the gradient of coefficients * log_prob. `inverse` [N] has each row's own 1 / temperature.

    logits [N, V] with an inner stride of one; labels [N]. Scores that are not requested are zero, as is
    everything in a row without a label. A label outside the vocabulary gives nan. Not differentiable.
    """
    if use_triton(logits, labels):
        return _launch_forward(logits, labels, options, coefficients, inverse)
    z, slope = _cap_rows(logits, options, inverse)
    lse = torch.logsumexp(z, 1)
    log_p = z - lse.unsqueeze(1)
    p = log_p.exp()
    inside = (labels >= 0) & (labels < z.shape[1])
    index = labels.where(inside, 0).long().unsqueeze(1)
    found = z.new_zeros(5, len(z))
    found[LOG_PROB] = log_p.gather(1, index).squeeze(1).where(inside, float("nan"))
    found[LSE] = lse
    if options.entropy:
        found[ENTROPY] = -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
    if options.log_sum_sq_probs:
        found[LOG_SUM_SQ] = (2 * log_p).logsumexp(1)
    if options.top1:
        found[TOP1] = (first_largest(logits, options.logit_scale) == labels).to(found.dtype)
    if coefficients is not None:
        grad = p.mul_(-coefficients.unsqueeze(1)).scatter_add_(1, index, coefficients.unsqueeze(1))
        logits.copy_((grad * slope).masked_fill_((labels == options.ignore_index).unsqueeze(1), 0.0))
    return found.masked_fill_(labels == options.ignore_index, 0.0)


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    found: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    *,
    options: RowOptions,
    inverse: Tensor | None = None,
) -> None:
    """Overwrite logits [N, V] with the gradient of grad_log_probs * log_prob + grad_entropy * entropy, given
    `found` [5, N] from `row_scores`, and its `inverse`. Both upstream gradients are contiguous [N]."""
    lse, entropy = found[LSE].contiguous(), found[ENTROPY].contiguous()
    if use_triton(logits, labels):
        vocab = logits.shape[1]
        block = min(next_power_of_2(vocab), _BACKWARD_BLOCK)
        blocks = ceil_div(vocab, block)
        if len(logits):
            with on_device_of(logits):
                _backward_kernel[(len(logits) * blocks,)](
                    *_common(logits, labels, options, inverse),
                    lse,
                    entropy,
                    grad_log_probs,
                    grad_entropy,
                    blocks,
                    HAS_SOFTCAP=options.softcap is not None,
                    BLOCK=block,
                    num_warps=max(1, block // 512),
                )
        return
    z, slope = _cap_rows(logits, options, inverse)
    log_p = z - lse.unsqueeze(1)
    p = log_p.exp()
    surprise = (log_p + entropy.unsqueeze(1)).masked_fill(p == 0, 0.0)
    grad = -p * (grad_log_probs.unsqueeze(1) + grad_entropy.unsqueeze(1) * surprise)
    inside = (labels >= 0) & (labels < z.shape[1])
    row = torch.arange(len(z), device=z.device)
    grad[row, labels.where(inside, 0).long()] += grad_log_probs
    logits.copy_((grad * slope).masked_fill((labels == options.ignore_index).unsqueeze(1), 0.0))


def first_largest(logits: Tensor, logit_scale: float) -> Tensor:
    """Column of each row's largest scaled logit, the first among equals.  [..., V] -> [...]"""
    sign = (logit_scale > 0) - (logit_scale < 0)
    return (logits if sign == 1 else logits * sign).argmax(-1)


def _cap_rows(logits: Tensor, options: RowOptions, inverse: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """`cap_logits` with each row's own temperature."""
    if inverse is None:
        return cap_logits(logits, options.logit_scale, options.softcap)
    z, slope = cap_logits(logits, options.logit_scale, options.softcap)
    return z * inverse.unsqueeze(1), slope * inverse.unsqueeze(1)


def _launch_forward(logits, labels, options, coefficients, inverse):
    rows, vocab = logits.shape
    found = torch.zeros(5, rows, dtype=torch.float32, device=logits.device)
    if rows:
        # Every score, and the cap, needs registers.
        extras = options.entropy + options.top1 + options.log_sum_sq_probs + (options.softcap is not None)
        lanes, depth = _SCORE_TILE if coefficients is None else _GRADIENT_TILE[extras > 1]
        lanes, depth = fit_tile(vocab, (lanes, max(depth >> extras, 1)))
        with on_device_of(logits):
            _forward_kernel[(rows,)](
                *_common(logits, labels, options, inverse),
                found,
                rows,
                None if coefficients is None else coefficients.contiguous(),
                HAS_SOFTCAP=options.softcap is not None,
                WITH_ENTROPY=options.entropy,
                WITH_TOP1=options.top1,
                WITH_SQUARES=options.log_sum_sq_probs,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),  # a thread loads 16 bytes of half precision at a time
            )
    return found


def _common(logits, labels, options, inverse):
    """Leading arguments of both kernels."""
    return (
        logits,
        labels.contiguous(),
        logits.stride(0),
        logits.shape[1],
        options.ignore_index,
        options.logit_scale,
        1.0 if options.softcap is None else options.softcap,
        None if inverse is None else inverse.contiguous(),
    )


# Cross entropy's tile. For many scores, half the warps share the registers of 32: few enough rows are in
# flight in any case for the L2 cache to hold them until the gradient overwrites them.
_SCORE_TILE = 1024, 8  # lanes, depth
_GRADIENT_TILE = (8192, 4), (4096, 4)
_BACKWARD_BLOCK = 4096


@jit
def _accumulate(
    maximum,
    normalizer,
    surprises,
    squares,
    beaten,
    row_ptr,
    columns,
    label,
    a_label,
    vocab,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    WITH_ENTROPY,
    WITH_TOP1,
    WITH_SQUARES,
    MASKED,
):
    """Accumulate logits of columns [DEPTH, LANES] into each lane's m, n, s, q of the formulas above, in
    powers of two, and into whether one of them precedes the label's."""
    a = load_columns(row_ptr, columns, vocab, MASKED)
    z, _ = scaled_logits(a, logit_scale, softcap, HAS_SOFTCAP)
    if MASKED:
        z = tl.where(columns < vocab, z, -float("inf"))
    larger = tl.maximum(maximum, tl.max(z, 0))
    # While every logit so far is -inf, subtract zero: exp2(-inf - -inf) would be nan.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    below = z - shift[None, :]
    e = tl.exp2(below)
    decay = tl.exp2(maximum - shift)
    if WITH_ENTROPY:
        grown = tl.where(normalizer == 0.0, 0.0, maximum - shift) * normalizer
        # Logits further below have no weight, and -inf * 0 would be nan.
        surprises = (surprises + grown) * decay + tl.sum(e * tl.maximum(below, -1000.0), 0)
    if WITH_SQUARES:
        squares = squares * (decay * decay) + tl.sum(e * e, 0)
    if WITH_TOP1:
        sign = tl.where(logit_scale > 0, 1.0, tl.where(logit_scale < 0, -1.0, 0.0))
        before = (a * sign > a_label * sign) | (a != a) | ((a * sign == a_label * sign) & (columns < label))
        if MASKED:
            before = before & (columns < vocab)
        beaten = tl.maximum(beaten, tl.max(before.to(tl.int32), 0))
    return larger, normalizer * decay + tl.sum(e, 0), surprises, squares, beaten


@jit
def _overwrite(row_ptr, columns, label, lse2, coefficient, vocab, logit_scale, softcap, HAS_SOFTCAP, MASKED):
    """Overwrite the logits of some columns with the gradient of coefficient / logit_scale * log_prob."""
    z, slope = scaled_logits(load_columns(row_ptr, columns, vocab, MASKED), logit_scale, softcap, HAS_SOFTCAP)
    grad = -coefficient * tl.exp2(z - lse2)
    grad = tl.where(columns == label, grad + coefficient, grad)
    if HAS_SOFTCAP:
        grad *= slope
    if MASKED:
        tl.store(row_ptr + columns, grad.to(row_ptr.dtype.element_ty), mask=columns < vocab)
    else:
        tl.store(row_ptr + columns, grad.to(row_ptr.dtype.element_ty))


@jit
def _forward_kernel(
    logits_ptr,
    labels_ptr,
    logits_stride,
    vocab,
    ignore_index,
    logit_scale,
    softcap,
    inverse_ptr,
    found_ptr,
    rows,
    coefficients_ptr,
    HAS_SOFTCAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_TOP1: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program per row.  found [5, rows] must be zeroed"""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        if coefficients_ptr is not None:
            for start in range(0, vocab, LANES):
                columns = start + tl.arange(0, LANES)
                zeros = tl.zeros([LANES], row_ptr.dtype.element_ty)
                tl.store(row_ptr + columns, zeros, mask=columns < vocab)
        return
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + row)
        logit_scale *= inverse
        softcap *= inverse
    # A label outside the vocabulary must not be read. The label's logit is read before anything overwrites
    # it.
    inside = (label >= 0) & (label < vocab)
    a_label = tl.load(row_ptr + tl.where(inside, label, 0)).to(tl.float32)
    z_label, _slope = scaled_logits(a_label, logit_scale, softcap, HAS_SOFTCAP)
    # Each lane keeps its own maximum and sums: threads synchronise only at the row's end.
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
    maximum = tl.full([LANES], -float("inf"), tl.float32)
    normalizer = tl.zeros([LANES], tl.float32)
    surprises = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    beaten = tl.zeros([LANES], tl.int32)
    for start in range(0, whole, DEPTH * LANES):
        maximum, normalizer, surprises, squares, beaten = _accumulate(
            maximum,
            normalizer,
            surprises,
            squares,
            beaten,
            row_ptr,
            start + tile,
            label,
            a_label,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            WITH_ENTROPY,
            WITH_TOP1,
            WITH_SQUARES,
            False,
        )
    if whole < vocab:
        maximum, normalizer, surprises, squares, beaten = _accumulate(
            maximum,
            normalizer,
            surprises,
            squares,
            beaten,
            row_ptr,
            whole + tile,
            label,
            a_label,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            WITH_ENTROPY,
            WITH_TOP1,
            WITH_SQUARES,
            True,
        )

    largest = tl.max(maximum, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    decay = tl.exp2(maximum - shift)
    total = tl.sum(normalizer * decay, 0)
    lse2 = largest + tl.log2(total)
    log_prob = tl.where(inside, (z_label - lse2) * 0.6931471805599453, float("nan"))
    tl.store(found_ptr + row, log_prob)
    tl.store(found_ptr + rows + row, lse2 * 0.6931471805599453)
    if WITH_ENTROPY:
        grown = tl.where(normalizer == 0.0, 0.0, maximum - shift) * normalizer
        entropy = tl.log2(total) - tl.sum((surprises + grown) * decay, 0) / total
        tl.store(found_ptr + 2 * rows + row, entropy * 0.6931471805599453)
    if WITH_SQUARES:
        sum_of_squares = tl.sum(squares * (decay * decay), 0)
        log_sum = tl.log2(sum_of_squares) - 2.0 * tl.log2(total)
        tl.store(found_ptr + 3 * rows + row, log_sum * 0.6931471805599453)
    if WITH_TOP1:
        tl.store(found_ptr + 4 * rows + row, 1.0 - tl.max(beaten, 0).to(tl.float32))

    if coefficients_ptr is not None:
        coefficient = tl.load(coefficients_ptr + row) * logit_scale
        for start in range(0, whole, DEPTH * LANES):
            _overwrite(
                row_ptr,
                start + tile,
                label,
                lse2,
                coefficient,
                vocab,
                logit_scale,
                softcap,
                HAS_SOFTCAP,
                False,
            )
        if whole < vocab:
            _overwrite(
                row_ptr,
                whole + tile,
                label,
                lse2,
                coefficient,
                vocab,
                logit_scale,
                softcap,
                HAS_SOFTCAP,
                True,
            )


@jit
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    logits_stride,
    vocab,
    ignore_index,
    logit_scale,
    softcap,
    inverse_ptr,
    lse_ptr,
    entropy_ptr,
    grad_log_probs_ptr,
    grad_entropy_ptr,
    blocks,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row, of `blocks`; the row's values are contiguous."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(row_ptr + columns, tl.zeros([BLOCK], row_ptr.dtype.element_ty), mask=columns < vocab)
        return
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + row)
        logit_scale *= inverse
        softcap *= inverse
    z, slope = scaled_logits(load_columns(row_ptr, columns, vocab, True), logit_scale, softcap, HAS_SOFTCAP)
    log_p = z * 0.6931471805599453 - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    grad_log_prob = tl.load(grad_log_probs_ptr + row)
    surprise = tl.where(p == 0.0, 0.0, log_p + tl.load(entropy_ptr + row))
    grad = -p * (grad_log_prob + tl.load(grad_entropy_ptr + row) * surprise)
    grad = tl.where(columns == label, grad + grad_log_prob, grad) * logit_scale
    if HAS_SOFTCAP:
        grad *= slope
    tl.store(row_ptr + columns, grad.to(row_ptr.dtype.element_ty), mask=columns < vocab)
