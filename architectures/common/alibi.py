"""Slopes of attention whose scores fall with the distance (ALiBi: Press et al., 2021, arXiv:2108.12409)."""

from __future__ import annotations

import torch


def alibi_slopes(heads: int, steepest: float = 8.0, *, interleaved: bool = False) -> tuple[float, ...]:
    """Slopes of all heads, in float32 as the references compute them: 2^(-8 i / heads), i from 1.

    For a number of heads that is not a power of two, heads take the slopes of the next lower power, then
    every other slope of twice that power. `interleaved`: the slopes of the next higher power, every other one
    first (MPT). `steepest` replaces the 8.
    """
    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return _geometric(heads, steepest)
    doubled = _geometric(2 * power, steepest)
    if interleaved:
        return (*doubled[1::2], *doubled[::2])[:heads]
    return (*_geometric(power, steepest), *doubled[::2][: heads - power])


def _geometric(count: int, steepest: float) -> tuple[float, ...]:
    exponents = torch.arange(1, count + 1, dtype=torch.float32, device="cpu") * (steepest / count)
    return tuple(torch.pow(2.0, -exponents).tolist())
