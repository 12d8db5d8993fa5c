"""Plain twin of `adamw`: the same formula, operation by operation, for a CPU.

Every operation used here has one correctly rounded result, on every CPU and with any number of threads.
`addcmul`, `lerp` and `alpha=` are avoided, since they round once or twice depending on the CPU, and so is
float32 `sqrt`, which is MKL's and wrong by one ulp on some CPUs. The last term of the step is torch's own
AdamW with a gradient of zero, betas that are 1 in float32 and no weight decay, which leaves the moments as
they are: its root, product, quotient and sum are each rounded correctly, in a quarter of the time of a root
in float64. Operations and their order are the kernel's, so both forms agree bitwise in Triton's interpreter.
On a GPU the moments agree, too; the step's square root and quotient are off by up to two ulps there.

A parameter is updated in pieces of 131,072 elements with about 35 operations, whose intermediate results
share 3 MiB of buffers and stay in caches. Memory is read and written once. Smaller pieces would spend more
time dispatching than computing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels.optimizer._operands import AdamWSettings, AdamWTensors, draws, numbers_of
from liger_models.kernels.optimizer._random_bits import (
    PERIOD,
    rounding_noise,
    table_of_words,
    words_of_periods,
)

_PIECE = 2 * PERIOD


class Buffers:
    """Memory for intermediate results, reused by one piece after another."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._room: _Scratch | None = None

    def scratch(self, count: int, dtype: torch.dtype, device: torch.device) -> _Scratch:
        """Buffers of `count` elements, in the memory of the previous call's."""
        scratch = self._room
        if (
            scratch is not None
            and scratch.m.shape == (count,)
            and (scratch.m.dtype, scratch.m.device) == (dtype, device)
        ):
            return scratch
        memory = self._memory.get((dtype, device))
        if memory is None or memory.numel() < 6 * count:
            memory = self._memory[dtype, device] = torch.empty(6 * count, dtype=dtype, device=device)
        spare, m, v, w, x = memory[: 6 * count].split([2 * count, *[count] * 4])
        self._room = _Scratch(
            spare[:count],
            m,
            v,
            w,
            x,
            spare.view(torch.float64)[:count],
            spare[count:],
            *(t.view(torch.int32)[:count] for t in (spare, m, v, w, x)),
        )
        self._room.zeros.zero_()
        return self._room


class _Scratch(NamedTuple):
    """Gradient, moments, weight and scratch memory. The float64 root and then the random words reuse the
    gradient's memory; only the root writes to `zeros`. `_bits` are int32 views of the float32 numbers."""

    g: Tensor
    m: Tensor
    v: Tensor
    w: Tensor
    x: Tensor
    double: Tensor
    zeros: Tensor
    words: Tensor
    m_bits: Tensor
    v_bits: Tensor
    w_bits: Tensor
    x_bits: Tensor


def adamw_plain(
    tensors: AdamWTensors,
    settings: AdamWSettings,
    factor: Tensor | None = None,
    buffers: Buffers | None = None,
) -> None:
    """Plain twin of `adamw`, for one parameter. Random bits are the kernel's."""
    size, first = tensors.parameter.numel(), tensors.offset
    wide = torch.float64 if tensors.parameter.dtype == torch.float64 else torch.float32
    numbers = _Numbers(tensors.step, settings, wide)
    buffers = buffers or Buffers()
    drawn = draws(tensors.parameter, tensors.exp_avg, settings.weights)
    words = _Words(tensors, settings.seed) if drawn else None
    head = min(size, _PIECE - first % _PIECE)
    whole, rest = divmod(size - head, _PIECE)
    sizes = [head, *[_PIECE] * whole, *[rest] * bool(rest)]
    flat = [None if tensor is None else tensor.view(-1) for tensor in (*tensors[:4], tensors.residue)]
    pieces = [[None] * len(sizes) if tensor is None else tensor.split(sizes) for tensor in flat]
    for count, *piece in zip(sizes, *pieces, strict=True):
        scratch = buffers.scratch(count, wide, tensors.parameter.device)
        _update_piece(piece, first, settings.weights, numbers, factor, words, scratch)
        first += count


class _Numbers:
    """Scalar factors of a step, as 0-d tensors of the dtype of the computation."""

    def __init__(self, step: Tensor, settings: AdamWSettings, dtype: torch.dtype):
        given = [torch.tensor(number, dtype=dtype, device=step.device) for number in numbers_of(settings)]
        lr, self.beta1, self.rest1, log2_beta1, self.beta2, self.rest2, log2_beta2, eps, decay = given
        t = step.double()
        root = (1 - torch.exp2(t * log2_beta2)).sqrt()
        self.step_size = (lr * root / (1 - torch.exp2(t * log2_beta1))).to(dtype).item()
        self.floor = (eps * root).to(dtype).item()
        self.minus_decay = -decay


class _Words:
    """Random words of a parameter."""

    def __init__(self, tensors: AdamWTensors, seed: int):
        key = seed, tensors.step, tensors.place
        first, stop = tensors.offset, tensors.offset + tensors.parameter.numel()
        self.period = first // PERIOD
        self.of_periods = words_of_periods(*key, self.period, -(-stop // PERIOD))
        one = len(self.of_periods) == 1
        self.start = first % PERIOD if one else 0
        self.table = table_of_words(*key, self.start, self.start + stop - first if one else PERIOD)

    def write(self, first: int, words: Tensor) -> None:
        """Write the words of consecutive elements of the parameter, starting with `first`."""
        stop = first + len(words)
        for period in range(first // PERIOD, -(-stop // PERIOD)):
            begin, end = max(first, period * PERIOD), min(stop, (period + 1) * PERIOD)
            place = begin - period * PERIOD - self.start
            of_period = self.of_periods[period - self.period]
            table = self.table[place : place + end - begin]
            torch.bitwise_xor(table, of_period, out=words[begin - first : end - first])


def _update_piece(
    pieces, first, weights, n: _Numbers, factor, random: _Words | None, scratch: _Scratch
) -> None:
    parameter, gradient, exp_avg, exp_avg_sq, residue = pieces
    g, m, v, w, x, double, zeros, words, m_bits, v_bits, w_bits, x_bits = scratch
    g.copy_(gradient)
    if factor is not None:
        g.mul_(factor)
    m.copy_(exp_avg).mul_(n.beta1).add_(torch.mul(g, n.rest1, out=x))
    v.copy_(exp_avg_sq).mul_(n.beta2).add_(torch.mul(g, n.rest2, out=x).mul_(g))
    w.copy_(parameter)
    if residue is not None and residue.dtype == torch.bfloat16:
        w.add_(x.copy_(residue))
    elif residue is not None:
        w_bits.add_(x_bits.copy_(residue))
    w.add_(torch.mul(w, n.minus_decay, out=x))
    fused = w.device.type == "cpu" and w.dtype == torch.float32
    if fused:
        torch._fused_adamw_(
            *([w], [zeros], [m], [v], [], [_LATE]),
            lr=n.step_size,
            beta1=_ONE,
            beta2=_ONE,
            weight_decay=0.0,
            eps=n.floor,
            amsgrad=False,
            maximize=False,
        )
    else:
        # The square of a midpoint of two float32 neighbours has 50 bits and v has 24: the root of v is at
        # least 4 float64 ulps away from a midpoint. A float64 root is off by less than one ulp, and so rounds
        # correctly.
        x.copy_(double.copy_(v).sqrt_()).add_(n.floor)
        w.addcdiv_(m, x, value=-n.step_size)  # product, quotient and sum are each rounded

    # A NaN moment makes the weight NaN. Masking it in every piece would take half as long as a step.
    careful = w.device.type != "cpu" or math.isnan(w.sum().item())
    if careful and fused:  # an infinite first moment has become NaN
        m.copy_(exp_avg).mul_(n.beta1).add_(torch.mul(g, n.rest1, out=x))
    noise = None
    if random is not None:
        random.write(first, words)
        noise = rounding_noise(words, 0, out=x_bits)
    _store(exp_avg, m, m_bits, noise, careful)
    _store(exp_avg_sq, v, v_bits, noise, careful)
    if residue is None:
        at_random = random is not None and weights == "stochastic"
        noise = rounding_noise(words, 1, out=x_bits) if at_random else None
        _store(parameter, w, w_bits, noise, careful)
    elif residue.dtype == torch.bfloat16:
        parameter.copy_(w)
        residue.copy_(w.sub_(x.copy_(parameter)))
    else:
        # Ties round away from zero, not to even: the loss is then the lower half, with a sign.
        residue.copy_(w_bits.masked_fill(w.isnan(), 0) if careful else w_bits)
        _store(parameter, w, w_bits, 0x8000, careful)


def _store(target: Tensor, wide: Tensor, bits: Tensor, noise: Tensor | int | None, careful: bool) -> None:
    """Round to nearest; or to bfloat16 by truncation, in place, after adding 16 bits of noise."""
    if noise is None or target.dtype != torch.bfloat16:
        target.copy_(wide)
        return
    if wide.dtype == torch.float64:
        wide = wide.float()
        bits = wide.view(torch.int32)
    nan = wide.isnan() if careful else None
    bits.add_(noise).bitwise_right_shift_(16)
    if nan is not None:
        bits.masked_fill_(nan, _NAN)  # a carry would turn some NaNs into zeros
    target.view(torch.int16).copy_(bits)


_NAN = 0x7FC0
# For torch's AdamW: a beta that is 1 in float32, and a step at which its powers are 0.
_ONE = 1 - 2.0**-53
_LATE = torch.tensor(2.0**100, dtype=torch.float32, device="cpu")
