"""Parts and wholes of sharded parameters (DTensors of FSDP2); ordinary tensors are their own parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, torch.nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def from_local(own: Tensor, parameter: Any) -> Tensor:
    """The tensor with the parameter's shape and sharding, given this rank's part `own`."""
    if not is_dtensor(parameter):
        return own
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(own, mesh, placements, run_check=False, **shape)


def gathered(own: Tensor, parameter: Any) -> Tensor:
    """The whole tensor, given this rank's part `own`, for a parameter; all ranks must call this."""
    return whole_value(from_local(own, parameter))


def whole_value(value: Any) -> Any:
    """The whole of a sharded tensor; other values unchanged. All ranks must call this."""
    return value.full_tensor() if isinstance(value, Tensor) and is_dtensor(value) else value  # type: ignore[attr-defined]


def sharded(value: Any, parameter: Any) -> Any:
    """Shard a whole value as its parameter is, if it has the parameter's shape."""
    if not is_dtensor(parameter) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=parameter.placements)
