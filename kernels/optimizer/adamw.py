"""AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101, algorithm 2), with several ways to keep weights in
bfloat16.

    g = gradient * factor                    clipping and the loss scale, folded in
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    w = w - lr * weight_decay * w - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

computing the last term as lr r / (1 - beta1^t) * m / (sqrt(v) + eps r), with r = sqrt(1 - beta2^t).
Everything is computed in float32 (float64 for float64 weights). The spacing of bfloat16 around 0.02 is
0.0001, so rounding w to nearest loses every step smaller than half of that. Hence:

    stochastic     w is rounded up or down at random, so that it is right on average (as Gupta et al., 2015,
                   arXiv:1502.02551); 2 bytes a weight
    compensated    the rounding error is kept in bfloat16 and added before the next step (Kahan, 1965);
                   4 bytes, which hold about 17 bits of the weight
    master         the rounding error is kept exactly: the weight and 16 more bits are the two halves of a
        float32, and training matches float32 weights; 4 bytes
    plain          round to nearest, as torch.optim.AdamW; 2 bytes

bfloat16 moments are rounded stochastically, or to nearest with `plain`: rounding to nearest with beta2 =
0.999 would never let a second moment decrease.

Minimum traffic, for moments of b bytes: 6 + 4 b per bfloat16 weight (gradient and weight read, weight
written, moments read and written), 10 + 4 b with a residue. One launch for all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, float64_device, jit, on_device_of, tl, use_triton
from liger_models.kernels.optimizer._adamw_plain import Buffers, adamw_plain
from liger_models.kernels.optimizer._operands import (
    AdamWSettings,
    AdamWTensors,
    copied_to,
    draws,
    numbers_of,
)
from liger_models.kernels.optimizer._random_bits import (
    BLOCK,
    PERIOD,
    QUARTER,
    block_of_words,
    moment_noise,
    weight_noise,
)

WEIGHTS = ("stochastic", "compensated", "master", "plain")

# State of a bfloat16 weight in addition to itself.
RESIDUE_DTYPES = {"compensated": torch.bfloat16, "master": torch.int16}


def adamw(
    tensors: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of AdamW on parameters of one device; updates parameters, moments and residues in place.

    Args:
        tensors: the parameters and their state.
        settings: shared by all of them.
        factor: multiplies gradients; a float32 0-d tensor, None for 1.
        found_inf: skip the step if nonzero; a float32 0-d tensor.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: different sizes, memory that is not contiguous, or tensors on different devices.
    """
    tensors = [one for one in tensors if one.parameter.numel()]
    if not tensors:
        return
    launches = prepare_adamw(tensors, settings, factor, found_inf)
    if launches is not None:
        launches(settings, factor, found_inf)
    elif found_inf is None or not found_inf.item():
        buffers = Buffers()
        for one in tensors:
            _on_float64_device(one, settings, factor, buffers)


def _on_float64_device(
    tensors: AdamWTensors, settings: AdamWSettings, factor: Tensor | None, buffers: Buffers
) -> None:
    """Run the plain twin where there is float64: for MPS on the host, with a CPU's bits."""
    device = float64_device(tensors.parameter.device)
    if device == tensors.parameter.device:
        adamw_plain(tensors, settings, factor, buffers)
        return
    copies: dict[str, Any] = {
        name: x.to(device) for name, x in tensors._asdict().items() if isinstance(x, Tensor)
    }
    there = tensors._replace(**copies)
    adamw_plain(there, settings, None if factor is None else factor.to(device), buffers)
    for name in ("parameter", "exp_avg", "exp_avg_sq", "residue"):
        if (updated := getattr(there, name)) is not None:
            getattr(tensors, name).copy_(updated)


def prepare_adamw(
    tensors: Sequence[AdamWTensors], settings: AdamWSettings, *scaling: Tensor | None
) -> AdamWLaunches | None:
    """The launches of `adamw` on these operands; None if the plain twin runs. Raises as `adamw`.

    A step costs the host some microseconds a parameter to check and list its operands. While no operand
    moves, the launches can be used again: with a step's other settings, but the same `weights` and `seed`.
    If only gradients move, `moved` renews the addresses. The launches keep neither gradients nor state alive.
    """
    filled = [one for one in tensors if one.parameter.numel()]
    for one in filled:
        _check(one, settings.weights)
    operands = [operand for one in filled for operand in one[:6]]
    floating = [operand for operand in operands if operand is None or operand.is_floating_point()]
    if not filled or not use_triton(filled[0].parameter, *floating, *scaling):
        return None
    return AdamWLaunches(tensors, settings)


def _check(tensors: AdamWTensors, weights: str) -> None:
    parameter, gradient, exp_avg, exp_avg_sq, step, residue, *_ = tensors
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}; expected one of {', '.join(WEIGHTS)}")
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise TypeError(f"a parameter is {parameter.dtype}; expected float32, bfloat16 or float64")
    if not gradient.is_floating_point():
        raise TypeError(f"a gradient is {gradient.dtype}; expected a floating point tensor")
    if exp_avg.dtype not in (parameter.dtype, torch.float32, torch.bfloat16):
        raise TypeError(f"a moment is {exp_avg.dtype}; expected {parameter.dtype}, float32 or bfloat16")
    if exp_avg_sq.dtype != exp_avg.dtype:
        raise TypeError(f"the moments are {exp_avg.dtype} and {exp_avg_sq.dtype}; expected one dtype")
    if step.dtype != torch.float32 or step.numel() != 1:
        raise TypeError(f"step is {step.dtype} {tuple(step.shape)}; expected one float32 number")
    expected = RESIDUE_DTYPES.get(weights) if parameter.dtype == torch.bfloat16 else None
    if (residue is None) != (expected is None) or (residue is not None and residue.dtype != expected):
        found = None if residue is None else residue.dtype
        raise TypeError(f"the residue of a {parameter.dtype} parameter is {found}; {weights} has {expected}")
    for tensor in (parameter, gradient, exp_avg, exp_avg_sq, residue):
        if tensor is None:
            continue
        if tensor.numel() != parameter.numel():
            raise ValueError(f"found {tuple(tensor.shape)} for a parameter of {tuple(parameter.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of {tuple(tensor.shape)} has strides {tensor.stride()}: not contiguous"
            )
        if tensor.device != parameter.device:
            raise ValueError(f"found tensors on {parameter.device} and on {tensor.device}")


# The table of a launch has a row per tensor: six addresses, then numel, offset, index, seed and the number of
# the tensor's first chunk. A program processes one chunk.
_COLUMNS = 11
_CHUNK_BLOCKS = 4
_NUM_WARPS = 4


class AdamWLaunches:
    """One launch for all tensors of the same dtypes: see `prepare_adamw`."""

    def __init__(self, tensors: Sequence[AdamWTensors], settings: AdamWSettings):
        kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype, bool], list[int]] = {}
        filled = [(place, one) for place, one in enumerate(tensors) if one.parameter.numel()]
        for place, one in filled:
            kind = (one.parameter.dtype, one.gradient.dtype, one.exp_avg.dtype, _is_aligned(one))
            kinds.setdefault(kind, []).append(place)
        self._parameters = [one.parameter for _, one in filled]
        with on_device_of(self._parameters[0]):
            self._launches = [_prepared(tensors, alike, kind, settings) for kind, alike in kinds.items()]

    def __call__(
        self, settings: AdamWSettings, factor: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Take one step, as `adamw`."""
        # Tell autograd about writes by the kernel, so that it detects a step between forward and backward.
        torch.autograd.graph.increment_version(self._parameters)
        # As Triton passes them to a compiled kernel; its interpreter would not round them.
        rounded = torch.tensor(numbers_of(settings), dtype=torch.float32, device="cpu").tolist()
        with on_device_of(self._parameters[0]):
            for launch in self._launches:
                operands = launch.table, launch.tensor_of_chunk, launch.lanes, factor, found_inf
                _adamw_kernel[(launch.programs,)](*operands, *rounded, **launch.constants)

    def moved(self, gradients: Sequence[int]) -> bool:
        """Read gradients at other addresses from now on, one for each of the tensors, everything else being
        the same. False, without effect, if that needs other launches.
        """
        columns = [torch.tensor([gradients[place] for place in launch.places]) for launch in self._launches]
        for launch, column in zip(self._launches, columns, strict=True):
            if launch.constants["ALIGNED"] and (column % 16).any():
                return False
        for launch, column in zip(self._launches, columns, strict=True):
            launch.rows[:, 1] = column
            launch.table = copied_to(launch.rows, self._parameters[0].device)
        return True


@dataclass
class _Launch:
    """One launch.

    Attributes:
        places: of its tensors, among all.
        rows: its table, on the host.
        programs, table, tensor_of_chunk, lanes, constants: the number of programs, and their operands.
    """

    places: list[int]
    rows: Tensor
    programs: int
    table: Tensor
    tensor_of_chunk: Tensor
    lanes: Tensor | None
    constants: dict[str, Any]


def _is_aligned(tensors: AdamWTensors) -> bool:
    """Whether 16-byte loads are possible, whatever the dtype."""
    if tensors.offset % 16 or tensors.parameter.numel() % 16:
        return False
    return not any(tensor is not None and tensor.data_ptr() % 16 for tensor in (*tensors[:4], tensors[5]))


def _prepared(
    all_tensors: Sequence[AdamWTensors], places: list[int], kind: tuple[Any, ...], settings: AdamWSettings
) -> _Launch:
    """The launch for the tensors at these places."""
    tensors = [all_tensors[place] for place in places]
    listed: list[list[int]] = []
    counts: list[int] = []
    for one in tensors:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in one[:6]]
        size = one.parameter.numel()
        listed.append([*addresses, size, one.offset, one.place, _signed(settings.seed), sum(counts)])
        blocks = ceil_div(one.offset + size, BLOCK) - one.offset // BLOCK
        counts.append(ceil_div(blocks, _CHUNK_BLOCKS))
    device = tensors[0].parameter.device
    rows = torch.tensor([[*row, count] for row, count in zip(listed, counts, strict=True)])
    table = copied_to(rows, device)
    numbers = torch.arange(len(rows), dtype=torch.int32, device=device)
    tensor_of_chunk = numbers.repeat_interleave(table[:, _COLUMNS], output_size=sum(counts))
    parameter_dtype, gradient_dtype, moment_dtype, aligned = kind
    drawn = draws(tensors[0].parameter, tensors[0].exp_avg, settings.weights)
    lanes = torch.arange(QUARTER, dtype=torch.int16, device=device) if drawn else None
    constants = {
        "PARAMETER": _STORED[parameter_dtype],
        "GRADIENT": _STORED[gradient_dtype],
        "MOMENT": _STORED[moment_dtype],
        "WEIGHTS": settings.weights,
        "DRAWS": drawn,
        "ALIGNED": aligned,
        "COLUMNS": _COLUMNS + 1,
        "CHUNK_BLOCKS": _CHUNK_BLOCKS,
        "QUARTER": QUARTER,
        "PERIOD": PERIOD,
        "num_warps": _NUM_WARPS,
        "enable_fp_fusion": False,
    }
    return _Launch(places, rows, sum(counts), table, tensor_of_chunk, lanes, constants)


def _signed(seed: int) -> int:
    """Reinterpret 64 unsigned bits as int64."""
    return (seed + 2**63) % 2**64 - 2**63


# Memory types in the kernel: bfloat16 as its bits, so that rounding is explicit and the same everywhere.
_STORED = {torch.float32: "float32", torch.bfloat16: "bits", torch.float16: "float16"}


@jit
def _adamw_kernel(
    table,
    tensor_of_chunk,
    lanes,
    factor,
    found_inf,
    lr,
    beta1,
    rest1,
    log2_beta1,
    beta2,
    rest2,
    log2_beta2,
    eps,
    decay,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    WEIGHTS: tl.constexpr,
    DRAWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr,
    QUARTER: tl.constexpr,
    PERIOD: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = table + tl.load(tensor_of_chunk + chunk).to(tl.int64) * COLUMNS
    parameter = _pointer(row, PARAMETER, ALIGNED)
    gradient = _pointer(row + 1, GRADIENT, ALIGNED)
    exp_avg = _pointer(row + 2, MOMENT, ALIGNED)
    exp_avg_sq = _pointer(row + 3, MOMENT, ALIGNED)
    step = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    residue = _pointer(row + 5, "bits", ALIGNED)
    size, offset = tl.load(row + 6), tl.load(row + 7)
    if ALIGNED:
        size, offset = tl.multiple_of(size, 16), tl.multiple_of(offset, 16)
    index, seed = tl.load(row + 8), tl.load(row + 9)

    t = step.to(tl.float64)
    root = tl.sqrt(1.0 - tl.exp2(t * log2_beta2))
    step_size = (lr * root / (1.0 - tl.exp2(t * log2_beta1))).to(tl.float32)
    floor = (eps * root).to(tl.float32)
    scale = 1.0 if factor is None else tl.load(factor)

    # Blocks are counted from the first element of the whole parameter, of which this tensor may be a part.
    first = offset // (4 * QUARTER) + (chunk - tl.load(row + 10)) * CHUNK_BLOCKS
    last = tl.minimum(first + CHUNK_BLOCKS, (offset + size + 4 * QUARTER - 1) // (4 * QUARTER))
    if found_inf is not None:
        last = tl.where(tl.load(found_inf) == 0.0, last, first)
    lane = tl.arange(0, QUARTER)
    if DRAWS:
        # Read from memory, as the operands are: the words then arrive in the threads that need them, without
        # passing through shared memory.
        drawing_lane = tl.load(lanes + lane)
    for block in range(first, last):
        if DRAWS:
            words = block_of_words(seed, step, index, block, drawing_lane, QUARTER, PERIOD)
        for quarter in tl.static_range(4):
            start = block * (4 * QUARTER) + quarter * QUARTER - offset
            low = tl.maximum(-start, 0).to(tl.int32)
            high = tl.minimum(size - start, QUARTER).to(tl.int32)
            inside = (lane >= low) & (lane < high)
            if ALIGNED:
                inside = tl.max_constancy(inside, 16)

            g = _read(gradient + start + lane, inside, GRADIENT) * scale
            m = _read(exp_avg + start + lane, inside, MOMENT)
            v = _read(exp_avg_sq + start + lane, inside, MOMENT)
            w = _read(parameter + start + lane, inside, PARAMETER)
            if PARAMETER == "bits" and WEIGHTS == "compensated":
                w += _read(residue + start + lane, inside, "bits")
            elif PARAMETER == "bits" and WEIGHTS == "master":
                kept = tl.load(residue + start + lane, inside, 0).to(tl.int32)
                w = (w.to(tl.int32, bitcast=True) + kept).to(tl.float32, bitcast=True)

            # Every product is rounded (enable_fp_fusion=False), as in the plain form.
            m = beta1 * m + rest1 * g
            v = beta2 * v + rest2 * g * g
            w = w - decay * w
            w -= step_size * m / (tl.sqrt(v) + floor)  # the step is off by an ulp or two, far below w

            noise = tl.zeros([QUARTER], tl.int32)
            if DRAWS:
                noise = moment_noise(words[quarter])
            _write(exp_avg + start + lane, m, inside, noise, MOMENT, DRAWS)
            _write(exp_avg_sq + start + lane, v, inside, noise, MOMENT, DRAWS)
            if PARAMETER == "bits" and WEIGHTS == "master":
                bits = _cut(w, tl.full([QUARTER], 0x8000, tl.int32))
                tl.store(parameter + start + lane, bits, inside)
                lost = w.to(tl.int32, bitcast=True) - (bits.to(tl.int32) << 16)
                tl.store(residue + start + lane, tl.where(w == w, lost, 0).to(tl.int16), inside)
            elif PARAMETER == "bits" and WEIGHTS == "compensated":
                bits = _nearest(w)
                tl.store(parameter + start + lane, bits, inside)
                lost = w - (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
                tl.store(residue + start + lane, _nearest(lost), inside)
            else:
                if DRAWS:
                    noise = weight_noise(words[quarter])
                _write(parameter + start + lane, w, inside, noise, PARAMETER, WEIGHTS == "stochastic")


@jit
def _pointer(cell, STORED: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer from the address in a cell of the table."""
    address = tl.load(cell)
    if STORED == "bits":
        pointer = address.to(tl.pointer_type(tl.int16))
    elif STORED == "float16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@jit
def _read(pointers, inside, STORED: tl.constexpr):
    value = tl.load(pointers, inside, 0)
    if STORED == "bits":
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@jit
def _write(pointers, wide, inside, noise, STORED: tl.constexpr, AT_RANDOM: tl.constexpr):
    if STORED == "float32":
        tl.store(pointers, wide, inside)
    elif AT_RANDOM:
        tl.store(pointers, _cut(wide, noise), inside)
    else:
        tl.store(pointers, _nearest(wide), inside)


@jit
def _cut(wide, noise):
    """Bits of a bfloat16: the upper half of a float32's, after adding noise to the lower half."""
    bits = (wide.to(tl.int32, bitcast=True) + noise) >> 16
    return tl.where(wide == wide, bits, 0x7FC0).to(tl.int16)  # a carry would turn some NaNs into zeros


@jit
def _nearest(wide):
    """Bits of the nearest bfloat16, ties to even."""
    return _cut(wide, 0x7FFF + ((wide.to(tl.int32, bitcast=True) >> 16) & 1))
