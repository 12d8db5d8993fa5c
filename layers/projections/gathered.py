"""Weights that FSDP2 gathers in float8.

Each process quantises its own rows of W [out, in] whenever a layer is gathered, and e4m3 numbers travel
instead of bfloat16: half the bytes, and half the copies into and out of the buffers. Sharded weights, their
gradients, the optimizer and checkpoints keep their dtype.

    rowwise:     q_i, s_i of each row i, as without sharding: a row belongs to one process
    tensorwise:  s from max |W|, in one reduction for all layers, each time the model is called

The columns of W, for dx, are made from the gathered rows (kernels/float8/quantize.py). With one scale they
have the bits of W's own. With a scale for each row a number is rounded a second time if it becomes subnormal
under the scale of its column.

FSDP2 asks the shard of a parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`, torch's interface
for tensor subclasses. Here they are attributes of the plain shard, so that nothing else sees a subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.kernels.float8.quantize import Float8, quantize, quantize_columns, turned

_HOOK = "fsdp_pre_all_gather"


class GatheredWeight(Tensor):
    """A whole weight in e4m3, which autograd sees as a tensor of the layer's dtype. Only float8 products
    can read it.

    Args:
        rows: [out, in] with a scale for each row, or one for all.
        dtype: of the weight, and of its gradient.
    """

    rows: Float8
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, rows: Float8, dtype: torch.dtype) -> GatheredWeight:
        values = rows.values
        weight = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)  # type: ignore[attr-defined]
        weight.rows = rows
        return cast(GatheredWeight, weight)

    @property
    def one_scale(self) -> bool:
        return self.rows.scales.numel() == 1

    def columns(self) -> Float8:
        """[in, out'] of the transposed weight, as from `quantize`."""
        if self.one_scale:
            return Float8(turned(self.rows).values, self.rows.scales)
        return quantize_columns(*self.rows)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        if func in _ALIASES and [*args[1:]] == _ALIASES[func](weight):
            return cls(weight.rows, weight.dtype)
        if func is torch.ops.aten.zeros_like.default:  # the gradient of a layer that did not run
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise RuntimeError(
            f"{func} was called on a weight that is gathered in float8, which only the products of a layer "
            "that runs in float8 can read; read the sharded parameter instead (full_tensor()), or gather "
            "weights in their own dtype (docs/float8.md)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"


_ALIASES: dict[Any, Any] = {
    torch.ops.aten.detach.default: lambda weight: [],
    torch.ops.aten.as_strided.default: lambda weight: [[*weight.shape], [*weight.stride()], 0],
}


def gathers_in_float8(weight: Any) -> bool:
    """Whether a layer's weight, sharded or gathered, is gathered in float8."""
    return isinstance(weight, GatheredWeight) or hasattr(getattr(weight, "_local_tensor", weight), _HOOK)


def can_gather_in_float8(layer: nn.Module) -> bool:
    """Whether the weight of a layer in float8 is trained and sharded by whole rows, the same number in each
    process.
    """
    weight: Any = layer.weight
    if not is_sharded(weight) or not weight.requires_grad:
        return False
    meshes = zip(weight.placements, weight.device_mesh.shape, strict=True)
    shards = [(placement.dim, size) for placement, size in meshes if placement.is_shard()]
    return len(shards) == 1 and shards[0][0] == 0 and weight.shape[0] % shards[0][1] == 0


def gather_rows_in_float8(layer: nn.Module) -> None:
    """Let FSDP2 gather the weight of a layer in float8, from the first gather on."""
    local: Any = cast(Any, layer.weight)._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = _quantise_shard, _whole_weight


def find_largest(layers: Sequence[nn.Module]) -> None:
    """Find the largest magnitude in each sharded weight with one scale, in one reduction for each group of
    processes. All of these call it together.
    """
    by_group: dict[Any, list[Any]] = {}
    layer: Any
    for layer in layers:
        if is_sharded(layer.weight) and layer.float8.one_scale:
            by_group.setdefault(_processes_of(layer.weight), []).append(layer)
    for group, members in by_group.items():
        own = [layer.weight.to_local() for layer in members]
        largest = torch.stack(torch._foreach_norm(own, float("inf"), dtype=torch.float32))
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        largest = torch.where(largest.isfinite(), largest, torch.nan)
        done = torch.cuda.current_stream().record_event() if largest.is_cuda else None
        for layer, found in zip(members, largest.unbind(), strict=True):
            layer.float8_largest = found, done


def _quantise_shard(
    mesh: Any, size: torch.Size, stride: Sequence[int], layer: Any, policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, torch.dtype]]:
    """Inputs of the all-gather, and metadata for `_whole_weight`: the scale, if there is one for all, and the
    dtype.
    """
    dtype, settings = policy.param_dtype or layer.weight.dtype, layer.float8
    own = layer.weight.to_local().to(dtype)
    if not settings.one_scale:
        rows = cast(Float8, quantize(own)[0])
        return (rows.values.view(torch.uint8), rows.scales), (None, dtype)
    if layer.float8_largest is None:
        find_largest([layer])
    largest, done = layer.float8_largest
    if done is not None:  # FSDP2 gathers on a stream of its own
        done.wait()
    largest = largest.to(dtype).float()  # rounding keeps the order
    rows = cast(Float8, quantize(own, one_scale=True, largest=largest)[0])
    return (rows.values.view(torch.uint8),), (rows.scales, dtype)


def _whole_weight(
    gathered: tuple[Tensor, ...],
    metadata: tuple[Tensor | None, torch.dtype],
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The weight from the gathered parts of all processes, in their memory, which FSDP2 frees and fills."""
    scale, dtype = metadata
    rows = Float8(gathered[0].view(torch.float8_e4m3fn), gathered[1] if scale is None else scale)
    if out is None:
        return GatheredWeight(rows, dtype), ()
    cast(GatheredWeight, out).rows = rows
    return None


def _processes_of(weight: Any) -> Any:
    """The process group over which the rows of a weight are divided."""
    (dim,) = (i for i, placement in enumerate(weight.placements) if placement.is_shard())
    return weight.device_mesh.get_group(dim)
