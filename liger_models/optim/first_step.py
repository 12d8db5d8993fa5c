"""Compilation of the kernels of an optimizer's first step from when it is made, while the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._ahead import compile_ahead
from liger_models.kernels.optimizer.adamw import RESIDUE_DTYPES, AdamWSettings, AdamWTensors, adamw
from liger_models.kernels.optimizer.sum_of_squares import sum_of_squares

_PLAIN = (Tensor, torch.nn.Parameter)


def compile_first_step(group: Mapping[str, Any], settings: AdamWSettings) -> None:
    """Begin to compile what clipping and a step of `AdamW` launch for a group's parameters on GPUs, with
    gradients of their dtype. Nothing is compiled in one of several processes, nor for DTensors.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    there = [p for p in group["params"] if p.is_cuda and type(p) in _PLAIN and p.numel()]
    for parameter in {(p.dtype, p.device, p.numel() % 16 == 0): p for p in there}.values():
        dtype, weights = parameter.dtype, settings.weights
        moment = dtype if group["moments"] == "auto" else getattr(torch, group["moments"])
        residue = RESIDUE_DTYPES.get(weights) if dtype == torch.bfloat16 else None
        key = dtype, moment, weights, parameter.numel() % 16 == 0
        compile_ahead(_step, key, parameter.detach(), moment, residue, settings)


def _step(
    parameter: Tensor, moment: torch.dtype, residue: torch.dtype | None, settings: AdamWSettings
) -> Tensor:
    flat = parameter.new_empty(parameter.numel())
    first, second = (torch.empty_like(flat, dtype=moment) for _ in range(2))
    more = None if residue is None else torch.empty_like(flat, dtype=residue)
    step = flat.new_empty((), dtype=torch.float32)
    square = sum_of_squares([flat])
    tensors = AdamWTensors(flat, torch.empty_like(flat), first, second, step, more, 0)
    adamw([tensors], settings, square.float())
    return square
