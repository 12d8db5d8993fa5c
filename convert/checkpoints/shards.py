"""Sharded tensors in checkpoint reads and writes: DTensor of torch.distributed, and parameters under
DeepSpeed's ZeRO-3.

When loading, each process reads its own part (`local_part`). When saving, all processes gather one tensor
after another (`whole`), and one of them writes (`write_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from liger_models.convert.checkpoints.atomic import alone_at
from liger_models.convert.checkpoints.expressions import Expr, Rows, write
from liger_models.convert.checkpoints.weight_map import WeightMap, connected
from liger_models.convert.errors import CheckpointError


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # DTensor is missing in builds without torch.distributed


def is_zero3(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_id")  # set by DeepSpeed; the parameter itself is empty between uses


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the whole tensor, sharded or not."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def local_part(tensor: Tensor, expr: Expr) -> tuple[Tensor, Expr]:
    """This process's part of `tensor`, and the expression of that part."""
    if not is_sharded(tensor):
        return tensor, expr
    sharded: Any = tensor
    (chunk,) = sharded.__create_chunk_list__()  # the interface of torch.distributed.checkpoint
    return sharded.to_local(), part_of(expr, chunk.offsets, chunk.sizes)


def part_of(expr: Expr, offsets: Sequence[int], sizes: Sequence[int]) -> Expr:
    """Expression of the part of a tensor that begins at `offsets` and has `sizes`."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < expr.shape[dim]:
            expr = Rows(expr, start, start + size, dim)
    return expr


def whole(tensor: Tensor) -> Tensor:
    """Gather the whole tensor, without its graph. Every process that holds a part must call this."""
    if is_zero3(tensor):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    if not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    return sharded.to(sharded.device_mesh.device_type).full_tensor()  # shards may be offloaded to the host


def checkpoint_tensors(get: Callable[[str], Tensor], weight_map: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a checkpoint's (name, tensor) pairs, made from native tensors, `get(name)`, that may be
    sharded: every process that holds a part must iterate.
    """
    for group in connected(weight_map):
        yield from write((expr, whole(get(name))) for name, expr in group.items()).items()


def _in_ranks(dist: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def write_together(
    tensors: Iterable[Tensor], write: Callable[[Iterator[Tensor]], None], folder: Path
) -> None:
    """Pass whole tensors one by one to `write`, which writes `folder`, in the first process if some are
    sharded. All processes return together, and all fail if that one fails.

    Among processes that each have the whole model (DDP) and call this for one folder at the same time, one
    writes and the others wait. Not all of them need to call it.
    """
    import torch.distributed as dist

    tensors = list(tensors)
    one_by_one = (whole(tensor) for tensor in tensors)
    if not any(is_sharded(tensor) or is_zero3(tensor) for tensor in tensors):
        with alone_at(folder) if _in_ranks(dist) else nullcontext(True) as is_writer:
            if is_writer:
                write(one_by_one)
        return

    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            write(one_by_one)
        except Exception as caught:
            error = caught
    for _ in one_by_one:  # exhaust it: other processes wait for this one's shards
        pass
    outcome: list[str | None] = [None if error is None else str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise CheckpointError(f"the process that writes failed: {outcome[0]}")
