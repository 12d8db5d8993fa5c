"""Rotary tables: the cosines and sines that rotate queries and keys.

    angle[t, i] = position[t] * inv_freq[i],    inv_freq[i] = theta ** (-2i / dim)

The rope types change `inv_freq` (and scale both tables by an attention factor) to extend a model beyond its
pretraining context:

| type       | source                             | effect                                                   |
|------------|------------------------------------|----------------------------------------------------------|
| `default`  | Su et al. 2021, arXiv:2104.09864   | the formula above                                        |
| `linear`   | Chen et al. 2023, arXiv:2306.15595 | divides all frequencies by `factor`                      |
| `dynamic`  | NTK-aware scaling, emozilla 2023   | theta grows with the sequence, beyond the trained length |
| `yarn`     | Peng et al. 2023, arXiv:2309.00071 | divides low frequencies by `factor`, keeps high ones     |
| `longrope` | Ding et al. 2024, arXiv:2402.13753 | one measured factor a frequency, for short and for long  |
| `llama3`   | Llama 3.1, 2024, arXiv:2407.21783  | as yarn by wavelength, with a linear blend between       |

All values are computed in float32, as in the reference implementations, and stay in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_models.kernels import rotary
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.layers.specs import RopeSpec


def rotary_tables(
    spec: RopeSpec, position_ids: Tensor, longest: int | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position.

    Args:
        spec: the rotary settings.
        position_ids: [T] integers, or [A, T] if positions have A axes and the spec assigns an axis to each
            pair of dimensions.
        longest: the largest position + 1, for the types that depend on it (`spec.depends_on_length`).
        factors: [dim / 2] float32, which multiply the frequencies of a spec with `learned`.

    Returns:
        cos, sin: [T, dim / 2] float32, scaled by the type's attention factor; [2, T, dim / 2], of the first
            and of the second dimensions of pairs, if `spec.axes` gives an axis to each dimension.

    Raises:
        ValueError: `learned` without factors.
    """
    length = effective_length(spec, longest) if spec.depends_on_length else 0
    inv_freq = _cached_inverse_frequencies(spec, length, position_ids.device)
    if spec.learned:
        if factors is None:
            raise ValueError("rotary frequencies with learned factors need these; found none")
        inv_freq = inv_freq * factors.to(inv_freq.device)
    if position_ids.dim() == 1:
        angles = position_ids[:, None].float() * inv_freq  # [T, dim / 2]
    else:
        of_axes = _by_axis(position_ids.float(), spec)
        if of_axes.shape[1] > len(inv_freq):  # an axis for each dimension
            of_axes = torch.stack(of_axes.chunk(2, dim=1))  # [2, T, dim / 2]
        angles = of_axes * inv_freq
    factor = _attention_factor(spec)
    return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def _by_axis(position_ids: Tensor, spec: RopeSpec) -> Tensor:
    """The position that rotates each pair of dimensions, [T, dim / 2], from positions [A, T]."""
    if spec.axes is None:
        raise ValueError(f"positions have {len(position_ids)} axes, and the rotary settings have one")
    return position_ids.T[:, _cached_axes(spec.axes, position_ids.device)]


@cached_tensors(64)
def _cached_axes(axes: tuple[int, ...], device: torch.device) -> Tensor:
    """The axis of each pair of dimensions, kept since a CUDA graph cannot be recorded over a copy of it."""
    return to_device(torch.tensor(axes, device="cpu"), device)


@cached_tensors(64)
def _cached_inverse_frequencies(spec: RopeSpec, length: int, device: torch.device) -> Tensor:
    # Made on the CPU and then moved, so that every device has the same bits.
    return _inverse_frequencies(spec, length).to(device)


def effective_length(spec: RopeSpec, longest: int | None) -> int:
    """The length that determines the frequencies of a type that depends on it, equal for all lengths that
    share the frequencies.
    """
    if longest is None:
        raise ValueError(f"rope type {spec.type!r} needs the longest position")
    if spec.type == "longrope":
        return int(longest > _required(spec, "original_max_position_embeddings"))
    return max(longest, int(_required(spec, "max_position_embeddings")))


def _inverse_frequencies(spec: RopeSpec, length: int) -> Tensor:
    inv_freq = _of_all_pairs(spec, length)
    if spec.frequencies is not None:
        inv_freq = inv_freq[list(spec.frequencies)]
    if spec.turning is not None:
        inv_freq[spec.turning :] = 0.0
    return -inv_freq if spec.clockwise else inv_freq


def _of_all_pairs(spec: RopeSpec, length: int) -> Tensor:
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32, device="cpu") / spec.dim
    if spec.type == "dynamic":
        factor, limit = _required(spec, "factor"), _required(spec, "max_position_embeddings")
        stretch = factor * length / limit - (factor - 1)
        return 1.0 / (spec.theta * stretch ** (spec.dim / (spec.dim - 2))) ** exponents
    if spec.type == "longrope":
        factors = spec.long_factor if length else spec.short_factor
        if factors is None or len(factors) != spec.dim // 2:
            found = "none" if factors is None else len(factors)
            raise ValueError(f"longrope needs {spec.dim // 2} long and short factors, found {found}")
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * spec.theta**exponents)
    inv_freq = 1.0 / spec.theta**exponents
    if spec.type == "linear":
        return inv_freq / _required(spec, "factor")
    if spec.type == "yarn":
        return _yarn(spec, inv_freq)
    if spec.type == "llama3":
        return _llama3(spec, inv_freq)
    return inv_freq


def _yarn(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    original = _required(spec, "original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that makes `rotations` rotations within the original context."""
        return spec.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast or 32.0), dimension(spec.beta_slow or 1.0)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(spec.dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((steps - low) / (high - low)).clamp(0, 1)
    return inv_freq / _yarn_factor(spec) * ramp + inv_freq * (1 - ramp)


def _llama3(spec: RopeSpec, inv_freq: Tensor) -> Tensor:
    factor, original = _required(spec, "factor"), _required(spec, "original_max_position_embeddings")
    low_factor, high_factor = _required(spec, "low_freq_factor"), _required(spec, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low_factor) / (high_factor - low_factor)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(wavelength > original / low_factor, inv_freq / factor, inv_freq)
    between = (wavelength <= original / low_factor) & (wavelength >= original / high_factor)
    return torch.where(between, blended, scaled)


def _yarn_factor(spec: RopeSpec) -> float:
    if spec.factor is not None:
        return spec.factor
    return _required(spec, "max_position_embeddings") / _required(spec, "original_max_position_embeddings")


def _attention_factor(spec: RopeSpec) -> float:
    """The factor of the tables that keeps the entropy of scores over a longer context."""
    if spec.type not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    factor = _yarn_factor(spec)
    if spec.type == "longrope":
        original = _required(spec, "original_max_position_embeddings")
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def _required(spec: RopeSpec, field: str) -> float:
    value = getattr(spec, field)
    if value is None:
        raise ValueError(f"rope type {spec.type!r} needs {field}, which the config does not give")
    return value


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys like transformers' `apply_rotary_pos_emb`, in its layout, in any model.

    Args:
        q, k: [batch, heads, seq, head_dim], or [batch, seq, heads, head_dim] with `unsqueeze_dim=2`.
        cos, sin: [batch or 1, seq, R], the same R / 2 angles twice; float32 is advised. R is head_dim, or
            less if only the first R elements of a head rotate.
        position_ids: ignored; accepted because callers pass it. The tables already belong to the positions.

    Returns:
        q and k rotated, in their layout.

    Raises:
        ValueError: shapes that do not fit, or tables narrower than a head whose halves differ, such as tables
            that hold each angle once. On a GPU the latter raises a device-side assertion.
    """
    width, head_dim = cos.shape[-1], q.shape[-1]
    if width % 2 or not 0 < width <= head_dim or sin.shape != cos.shape:
        found = f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise ValueError(f"{found}; expected both [..., R], R even and at most the head size, {head_dim}")
    if width < head_dim:
        _check_partial(cos, sin, head_dim)
    half = width // 2
    # Tables without a batch dimension broadcast; expanded over the batch they would be copied.
    cos, sin = ((table.squeeze(0) if table.dim() > 2 else table)[..., :half] for table in (cos, sin))
    if unsqueeze_dim == 2:
        return rotary(q, k, cos, sin)
    turned_q, turned_k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


def _check_partial(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """Check that the tables of a partly rotated head hold every angle twice."""
    message = (
        f"the halves of cos or sin {tuple(cos.shape)} differ; for heads of {head_dim}, of which R elements "
        "rotate, expected tables [..., R] that hold R / 2 angles twice: torch.cat([angles, angles], -1)"
    )
    alike = torch.stack([(a == b).all() for a, b in (cos.chunk(2, -1), sin.chunk(2, -1))]).all()
    if alike.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(alike, message)
    elif not alike:
        raise ValueError(message)
