"""Saved tensors of a model with its PEFT adapters merged, under the names without PEFT.

Each tensor is merged on request, into a copy. The model does not change, so unmerging cannot round it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.layout import WRAPPERS
from liger_models.convert.errors import CheckpointError


def merged_tensors(model: nn.Module) -> dict[str, functools.partial[Tensor]]:
    """Return a function for each saved tensor, by its name without adapters; tied tensors appear once. Its
    `args` are the tensor without adapters, and the adapters.

    Raises:
        CheckpointError: a tied tensor whose uses differ once merged, or a quantised one.
    """
    found: dict[str, functools.partial[Tensor]] = {}
    first: dict[int, str] = {}  # tensor id -> first name
    for name, tensor, adapters in _saved(model, "", ()):
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} is quantised ({tensor.dtype}), but a checkpoint holds dense weights; dequantise the "
                "model first"
            )
        get = functools.partial(_merged, tensor, adapters)
        other = first.setdefault(id(tensor), name)
        if other == name:
            found[name] = get
        elif not torch.equal(found[other](), get()):
            raise CheckpointError(
                f"{other} and {name} are tied, and an adapter would make them differ; untie them before the "
                "adapter is created"
            )
    return found


def _saved(
    module: nn.Module, path: str, adapters: tuple[Any, ...]
) -> Iterator[tuple[str, Tensor, tuple[Any, ...]]]:
    """Yield (name, tensor, adapters around it) of the saved tensors, in the model's order."""
    peft = sys.modules.get("peft")  # without it there is no adapter
    while peft is not None:
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            adapters, module = (*adapters, module), module.base_layer
        elif isinstance(module, peft.utils.TrainableTokensWrapper):
            module = module.token_adapter
        elif isinstance(module, peft.utils.ModulesToSaveWrapper):
            trained = not module.disable_adapters and module.active_adapters
            module = module.modules_to_save[trained[0]] if trained else module.original_module
        else:
            break
    yield from ((f"{path}{name}", p, adapters) for name, p in module.named_parameters(recurse=False))
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield f"{path}{name}", buffer, adapters
    for name, child in module.named_children():
        yield from _saved(child, path if name in WRAPPERS else f"{path}{name}.", ())


def _merged(tensor: Tensor, adapters: Sequence[Any]) -> Tensor:
    """Add the active adapters' deltas, unless they are merged or disabled."""
    adapters = [layer for layer in adapters if not layer.merged and not layer.disable_adapters]
    if not adapters:
        return tensor
    own = list(adapters[0].get_base_layer().parameters(recurse=False))
    before = [parameter.data for parameter in own]
    try:
        for layer in reversed(adapters):  # the innermost first
            layer.merge(safe_merge=True)  # replaces the storage, never writes in place
        return tensor.data
    finally:
        for parameter, memory in zip(own, before, strict=True):
            parameter.data = memory
        for layer in adapters:
            layer.merged_adapters.clear()
