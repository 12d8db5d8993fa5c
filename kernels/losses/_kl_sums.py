"""KL(softmax(y) || softmax(z)) of two rows of logits, in a single pass.

    sum_c a_c log(a_c / b_c) = sum_c a_c (y_c - z_c) - log(Y / Z)

where y and z are the logits less their row's maximum, Y and Z the sums of their exponentials, a = exp(y) / Y
and b = exp(z) / Z: the sum is accumulated together with the normalizers.
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.losses._logit_tiles import load_columns, scaled_logits


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
    """Accumulate columns [DEPTH, THREADS, WIDTH] into each thread's maxima of y and z, sums of exponentials
    of y and z less these, and sum of exp2(y) (y - z)."""
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
    # A product with a zero probability is zero, even if the difference is infinite.
    products += tl.sum(tl.sum(tl.where(e == 0.0, 0.0, e * (y - z)), 2), 0)
    y_sum += tl.sum(tl.sum(e, 2), 0)
    z_sum += tl.sum(tl.sum(tl.exp2(z), 2), 0)
    return larger_y, y_sum, larger_z, z_sum, products


@jit
def _finite(maximum):
    """Value to subtract from logits: zero while all are -inf, since exp2(-inf - -inf) would be nan."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@jit
def _shift_sums(y_max, y_sum, z_max, z_sum, products, larger_y, larger_z):
    """The three sums, rebased to other maxima."""
    rescale = tl.exp2(y_max - _finite(larger_y))
    change = (_finite(y_max) - _finite(larger_y)) - (_finite(z_max) - _finite(larger_z))
    products = tl.where(rescale == 0.0, 0.0, rescale * (products + y_sum * change))
    return y_sum * rescale, z_sum * tl.exp2(z_max - _finite(larger_z)), products


@jit
def kl_sums(
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
    # Five numbers per thread, not per lane, which would fill the registers.
    WIDTH: tl.constexpr = 8 if LANES >= 8 else LANES  # elements per load of a thread in half precision
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
