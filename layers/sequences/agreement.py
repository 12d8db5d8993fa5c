"""Agreement between processes on whether a training step goes ahead.

The processes of DistributedDataParallel, or of `fully_shard` (FSDP2), run the forward and backward passes of
a step together. If one of them refuses its batch, the others would wait for it in the next collective, so it
tells them and all raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded, is_zero3

OTHERS_REFUSED = (
    "another process refused its batch, and its error says why; the batch of this process passed its checks, "
    "but all processes must take the step together"
)


def is_of_several_processes() -> bool:
    """Whether there are other processes in torch.distributed."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return there and torch.distributed.get_world_size() > 1


def is_of_several(*modules: nn.Module, trained: bool = False) -> bool:
    """Return True if all processes must run these modules in each step: they train them together (or, if
    `trained`, the modules after them), or the modules are sharded and gathered during the forward pass.
    """
    if not is_of_several_processes():
        return False
    parameters = (p for module in modules for p in module.parameters())
    if torch.is_grad_enabled() and (trained or any(p.requires_grad for p in parameters)):
        return True
    from torch.distributed.fsdp import FSDPModule

    parts = [part for module in modules for part in module.modules()]
    gathered = any(is_zero3(p) for part in parts for p in part.parameters(recurse=False))
    return gathered or any(isinstance(part, FSDPModule) for part in parts)


def groups_of_step(model: nn.Module) -> list[Any]:
    """The process groups that run this training step together; [] if none is known, such as in evaluation or
    in micro-batches whose gradients DDP does not exchange.
    """
    if not (is_of_several_processes() and model.training and torch.is_grad_enabled()):
        return []
    wrapper = ddp_wrapper()
    if wrapper is not None:
        return [wrapper.process_group] if wrapper.require_backward_grad_sync else []
    return groups_of_shards(model.parameters())


def exchange_device(model: nn.Module) -> torch.device:
    """The device whose tensors the processes of a step exchange: that of the mesh, where FSDP2 divides the
    model, since CPU offloading keeps its shards on the host.
    """
    p = next(model.parameters())
    return torch.device(p.device_mesh.device_type) if is_sharded(p) else p.device  # type: ignore[attr-defined]


def ddp_wrapper() -> Any:
    """The DistributedDataParallel whose forward pass is running; None if there is none."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()


def groups_of_shards(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """The process groups over which FSDP2 shards these parameters; [] if none is sharded at the moment.
    Parameters are whole while their module runs, and with `reshard_after_forward=False` until its backward
    pass.
    """
    for p in parameters:
        if is_sharded(p):
            mesh: Any = p.device_mesh  # type: ignore[attr-defined]
            return [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return []


def any_process(flag: Tensor, groups: Iterable[Any]) -> Tensor:
    """The maximum of `flag` [1] int64 over the processes of these groups, which all call this."""
    for group in groups:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)
    return flag


@contextmanager
def refusing_together(groups: list[Any], device: torch.device) -> Iterator[None]:
    """Report an error raised within it to the other processes, which call `any_process` next."""
    try:
        yield
    except Exception:
        any_process(torch.ones(1, dtype=torch.long, device=device), groups)
        raise
