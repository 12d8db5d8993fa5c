"""Initial values of parameters that depart from the usual: `ModelSpec.fresh`."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from liger_models.layers.specs.fresh import Constant, Fresh, LogRates, Normal, StepBiases, Truncated, Uniform

_LEAST = 1e-12  # of numbers whose logarithm is taken


def note_fresh_weights(model: nn.Module, fresh: tuple[tuple[str, Fresh], ...]) -> None:
    """Note at each module how its own parameters start, by name, as its attribute `fresh`.

    Args:
        model: whose parameters' paths the patterns match; a tied parameter has several.
        fresh: patterns of paths, with the values. The last match counts.
    """
    if not fresh:
        return
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = {
        id(parameter): how
        for pattern, how in fresh
        for path, parameter in every.items()
        if fnmatchcase(path, pattern)
    }
    for module in model.modules():
        own = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        if found := {name: chosen[number] for name, number in own.items() if number in chosen}:
            module.fresh = found  # type: ignore[assignment]


@torch.no_grad()
def draw_fresh(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Fill a module's own parameters whose initial values were noted."""
    for name, how in getattr(module, "fresh", {}).items():
        parameter = getattr(module, name)
        if not getattr(parameter, "_is_hf_initialized", False):  # read from a checkpoint by transformers
            parameter.copy_(_values(parameter, how, generator))


def _values(like: Tensor, how: Fresh, generator: torch.Generator | None) -> Tensor:
    """Values of the shape [...] of a tensor, in float32 or wider."""
    wide = torch.empty_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    match how:
        case Normal(std):
            return wide.normal_(0.0, std, generator=generator)
        case Truncated(std, bound):
            return nn.init.trunc_normal_(wide, 0.0, std, -bound, bound, generator=generator)
        case Uniform(bound):
            return wide.uniform_(-bound, bound, generator=generator)
        case Constant(value):
            return wide.fill_(value)
        case LogRates(slowest, fastest):
            return wide.uniform_(slowest, fastest, generator=generator).clamp_(min=_LEAST).log_()
        case StepBiases(shortest, longest, floor):
            low, high = (math.log(max(bound, _LEAST)) for bound in (shortest, longest))
            step = wide.uniform_(0.0, 1.0, generator=generator).mul_(high - low).add_(low).exp_()
            step = step.clamp_(min=max(floor, _LEAST))
            return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
