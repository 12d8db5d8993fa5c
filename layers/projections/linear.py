"""A projection: `x @ W^T + b`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_everywhere


class Linear(nn.Linear):
    """torch's linear layer, but that its bias may be wider than its matrix, as some checkpoints hold it."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return project(x, self.weight, self.bias)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] -> [..., out] with weight [out, in] and bias [out]."""
    return F.linear(x, weight, as_wide_as(weight, bias))


def as_wide_as(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias in the dtype of the matrix beside it."""
    return None if bias is None else bias.to(weight.dtype)


def one_below_another(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie below one another in memory as one, or None if they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        alike = tensor.dtype == first.dtype and tensor.is_contiguous() and not tensor.is_meta
        if tensor.data_ptr() != end or not alike:
            return None
        end += tensor.numel() * tensor.element_size()
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def unwrapped(module: nn.Module) -> Any:
    """The layer within wrappers of adapters, which call it `base_layer`."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    return module


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody has changed how a module runs, or sees its inputs, outputs or their gradients."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    everywhere = (
        hooks_everywhere._global_forward_hooks,
        hooks_everywhere._global_forward_pre_hooks,
        hooks_everywhere._global_backward_hooks,
        hooks_everywhere._global_backward_pre_hooks,
    )
    return "forward" in vars(module) or any(own) or any(everywhere)
