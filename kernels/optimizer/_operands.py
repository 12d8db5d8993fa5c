"""Operands of both forms of AdamW: settings, tensors, the scalars of a step, and tables of addresses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class AdamWSettings(NamedTuple):
    """Settings shared by a parameter group. `weights` is one of WEIGHTS, `seed` a 64-bit number."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    weights: str
    seed: int


class AdamWTensors(NamedTuple):
    """A parameter and its state: contiguous, of one size, on one device.

    Args:
        parameter: float32, bfloat16 or float64.
        gradient: any floating dtype.
        exp_avg, exp_avg_sq: the moments m and v, of one dtype: the parameter's, float32 or bfloat16.
        step: the number t of the upcoming step, a float32 0-d tensor.
        residue: rounding errors of a bfloat16 parameter, of RESIDUE_DTYPES[weights]; else None.
        place: the parameter's index in the optimizer, for random bits.
        offset: index of its first element in the whole parameter; this may be a shard.
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    residue: Tensor | None
    place: int
    offset: int = 0


def numbers_of(settings: AdamWSettings) -> list[float]:
    """Scalars of a step, which the kernel takes in float32: lr, beta1, 1 - beta1, log2 beta1,
    beta2, 1 - beta2, log2 beta2, eps, lr * weight_decay."""
    lr, *betas, eps, weight_decay = settings[:5]
    of_betas = ((beta, 1.0 - beta, math.log2(beta) if beta else -math.inf) for beta in betas)
    return [float(number) for number in (lr, *sum(of_betas, ()), eps, lr * weight_decay)]


def draws(parameter: Tensor, exp_avg: Tensor, weights: str) -> bool:
    """Whether anything is rounded stochastically."""
    stochastic = weights == "stochastic" and parameter.dtype == torch.bfloat16
    return stochastic or (weights != "plain" and exp_avg.dtype == torch.bfloat16)


def copied_to(table: Tensor, device: torch.device) -> Tensor:
    """A copy of a launch's table on its device, from pinned memory, to avoid synchronising."""
    return (
        table.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else table.to(device, copy=True)
    )
