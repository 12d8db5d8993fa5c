"""Tile reads of logit rows, scaled and capped, for the loss kernels:

    z = softcap * tanh(logit_scale * a / softcap),   or logit_scale * a without a cap

One-pass log-sum-exp: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    ROCM,
    at_least_float32,
    ceil_div,
    interpreted,
    jit,
    next_power_of_2,
    tl,
    triton,
)

if triton is not None and not interpreted and not ROCM:
    from triton.language.extra import libdevice

    # NVIDIA's instruction, with an error of at most 2^-22; tl.log2 takes about thirty instructions.
    fast_log2 = libdevice.fast_log2f
else:

    @jit
    def fast_log2(x):
        """log2 of positive numbers."""
        return tl.log2(x)


def cap_logits(logits: Tensor, logit_scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """z of the formula above and its derivative dz/dlogits, in float32 or float64: plain twin."""
    z = at_least_float32(logits) * logit_scale
    if softcap is None:
        return z, logit_scale
    tanh = torch.tanh(z / softcap)
    return softcap * tanh, logit_scale * (1 - tanh.square())


def check_softcap(softcap: float | None, name: str = "softcap") -> None:
    """Raise ValueError unless the cap is None or positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name} is {softcap}; expected a positive number, or None for no cap")


def check_temperature(temperature: float) -> None:
    """Raise TypeError for a tensor of temperatures, ValueError for a temperature that is not positive."""
    if isinstance(temperature, Tensor):
        learned = " that requires a gradient" if temperature.requires_grad else ""
        raise TypeError(
            f"temperature is a tensor of shape {tuple(temperature.shape)}{learned}; expected one number for "
            "all tokens: temperatures for each row or token, and gradients of a temperature, are not "
            "supported. Pass float(temperature), or call once for each group of rows that share one"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")


def check_temperatures(temperature: float | Tensor) -> None:
    """Raise TypeError for a tensor of temperatures that requires a gradient, ValueError for a number that is
    not positive; of a tensor on a CPU, for any of its numbers.
    """
    if not isinstance(temperature, Tensor):
        return check_temperature(temperature)
    if temperature.requires_grad:
        raise TypeError("temperature requires a gradient, which is not computed; pass temperature.detach()")
    checked = temperature.device.type == "cpu" and not torch.compiler.is_compiling()
    if checked and not (temperature > 0).all():
        raise ValueError(f"temperature has the value {temperature.min().item()}; expected positive numbers")
    return None


def fold_temperature(
    logit_scale: float, softcap: float | None, temperature: float
) -> tuple[float, float | None]:
    """Scale and cap that give z / temperature: a smaller scale and a lower cap."""
    scale = float(logit_scale) / float(temperature)
    return scale, None if softcap is None else float(softcap) / float(temperature)


def fit_tile(vocab: int, tile: tuple[int, int]) -> tuple[int, int]:
    """Lanes and depth of a tile no larger than `tile` and not much longer than a row."""
    lanes = min(next_power_of_2(vocab), tile[0])
    return lanes, min(next_power_of_2(ceil_div(vocab, lanes)), tile[1])


def row_stride(values: Tensor | None) -> int:
    """Stride of a vector of one value per row; zero for a single value."""
    return 0 if values is None or len(values) == 1 else values.stride(0)


@jit
def load_columns(pointer, columns, vocab, MASKED, OTHER=0.0):
    """float32 values of the columns; only a row's last tile needs the comparisons of a mask."""
    if MASKED:
        values = tl.load(pointer + columns, mask=columns < vocab, other=OTHER)
    else:
        values = tl.load(pointer + columns)
    return values.to(tl.float32)


@jit
def scaled_logits(a, logit_scale, softcap, HAS_SOFTCAP, UNIT=1.4426950408889634):
    """UNIT z (z log2(e) by default, so that exp2 gives exp(z)), and dz/da of the cap only."""
    slope = 1.0
    if HAS_SOFTCAP:
        # From exp(-2|x|), which neither overflows nor loses the derivative where tanh is close to one.
        x = a * (logit_scale / softcap)
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        z = softcap * UNIT * tl.where(x < 0, -t, t)
        slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    else:
        z = a * (logit_scale * UNIT)
    return z, slope


@jit
def _accumulate(
    maximum,
    normalizer,
    weighted_sum,
    row_ptr,
    columns,
    class_weight_ptr,
    vocab,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
    MASKED,
):
    """Accumulate logits [DEPTH, LANES] into each lane's maximum, sum of exp2 and sum of w_c z_c."""
    z, _ = scaled_logits(load_columns(row_ptr, columns, vocab, MASKED), logit_scale, softcap, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        term = z
        if class_weight_ptr is not None:
            term *= load_columns(class_weight_ptr, columns, vocab, MASKED)
        if MASKED:
            term = tl.where(columns < vocab, term, 0.0)
        weighted_sum += tl.sum(term, 0)
    if MASKED:
        z = tl.where(columns < vocab, z, -float("inf"))
    larger = tl.maximum(maximum, tl.max(z, 0))
    # While every logit so far is -inf, subtract zero: exp2(-inf - -inf) would be nan.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    normalizer = normalizer * tl.exp2(maximum - shift) + tl.sum(tl.exp2(z - shift[None, :]), 0)
    return larger, normalizer, weighted_sum


@jit
def row_sums(
    row_ptr,
    class_weight_ptr,
    vocab,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
    LANES,
    DEPTH,
):
    """log2 of the sum of exp(z) over a row, and each lane's sum of w_c z_c log2(e), in one pass."""
    # Each lane keeps its own maximum and sum, so that threads synchronise only at the row's end. Taking
    # DEPTH logits at a time costs 1 + 1/DEPTH exponentials per logit.
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
    maximum = tl.full([LANES], -float("inf"), tl.float32)
    normalizer = tl.zeros([LANES], tl.float32)
    weighted_sum = tl.zeros([LANES], tl.float32)  # for label smoothing
    for start in range(0, whole, DEPTH * LANES):
        maximum, normalizer, weighted_sum = _accumulate(
            maximum,
            normalizer,
            weighted_sum,
            row_ptr,
            start + tile,
            class_weight_ptr,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
            False,
        )
    if whole < vocab:
        maximum, normalizer, weighted_sum = _accumulate(
            maximum,
            normalizer,
            weighted_sum,
            row_ptr,
            whole + tile,
            class_weight_ptr,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
            True,
        )
    largest = tl.max(maximum, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest + tl.log2(tl.sum(normalizer * tl.exp2(maximum - shift), 0)), weighted_sum


@jit
def row_lse2(row_ptr, vocab, logit_scale, softcap, HAS_SOFTCAP, LANES, DEPTH):
    """log2 of the sum of exp(z) over a row, in one pass."""
    lse2, _ = row_sums(row_ptr, None, vocab, logit_scale, softcap, HAS_SOFTCAP, False, LANES, DEPTH)
    return lse2


@jit
def row_argmax(row_ptr, vocab, logit_scale, LANES):
    """Column of a row's largest scaled logit, the first among equals; nan is the largest."""
    sign = tl.where(logit_scale > 0, 1.0, tl.where(logit_scale < 0, -1.0, 0.0))
    best = tl.full([LANES], -0x80000000, tl.int32)  # below the key of -inf
    index = tl.zeros([LANES], tl.int32)
    for start in range(0, vocab, LANES):
        columns = start + tl.arange(0, LANES)
        a = load_columns(row_ptr, columns, vocab, True) * sign + 0.0  # which makes 0 of -0
        bits = a.to(tl.int32, bitcast=True)
        # A float's bits, as an integer, have the float's order once negative ones are inverted.
        key = tl.where(a != a, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
        better = (key > best) & (columns < vocab)
        best = tl.where(better, key, best)
        index = tl.where(better, columns, index)
    return tl.min(tl.where(best == tl.max(best, 0), index, vocab), 0)
