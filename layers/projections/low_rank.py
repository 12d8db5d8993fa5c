"""Linear layers with low-rank paths (LoRA: Hu et al., 2021, arXiv:2106.09685) as one operation.

    y = x W^T + b + s drop(x) A^T B^T                  x [..., in], W [out, in], A [r, in], B [out, r]
    dx = dy W + u A,   dA = u^T x,   dB = dy^T t       t = s x A^T,   u = s dy B

Several paths of one layer add up. Layers of one input (query, key and value; gate and up) are one operation
with concatenated outputs: x is read once for all of their t, and dx is one tensor.

Saved for the backward pass: x, by reference or as its recipe (layers/recompute/activation_memory.py), t
[tokens, r], and for dropout the random state instead of the mask. A and B are cast to the dtype of the
product, x never to theirs; their gradients are summed in float32. Frozen tensors get no gradient and cost
nothing.

In float8 (float8.py) the product with W is quantised, and the paths keep their dtype and are added to it.

The low-rank paths run first, and the product with W is added to them: y and dx are written once more than in
the plain layer, x is read twice more (for t and dA) and dy twice (for u and dB). So y is rounded only once,
after the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.projections.float8 import check_float8, float8_linear
from liger_models.layers.projections.gathered import GatheredWeight
from liger_models.layers.projections.linear import Linear, as_wide_as, has_hooks
from liger_models.layers.projections.low_rank_autograd import run_low_rank
from liger_models.layers.projections.low_rank_plan import Adapter, Projection, product_dtype
from liger_models.layers.projections.ternary import is_ternary


def low_rank_linear(x: Tensor, *projections: Projection) -> Tensor:
    """Apply linear layers of one input, with their low-rank paths, and concatenate the outputs.

    The backward pass does not read the output, so its memory may be reused.

    Args:
        x: [..., in].
        projections: the layers.

    Returns:
        [..., sum of out], in the dtype of x or of autocast.

    Raises:
        RuntimeError: incompatible dtypes or shapes, as from torch's linear layer; float8 on a device without.
        TypeError: float8 of another dtype than bfloat16.
        ValueError: a weight that has `dense` and requires a gradient.
    """
    if any(p.dense is not None and p.weight.requires_grad for p in projections):
        raise ValueError("a weight with `dense` has no gradient; set its requires_grad to False")
    dtype = product_dtype(x)
    for projection in projections:
        if projection.float8 is not None:
            cast = projection.dense is not None or torch.is_autocast_enabled(x.device.type)
            weight = dtype if cast else projection.weight.dtype
            check_float8(x.device, dtype, weight, projection.float8)
    if torch.compiler.is_compiling():
        return torch.cat([plain_low_rank_linear(x, projection, dtype) for projection in projections], dim=-1)
    return run_low_rank(x, None, projections, dtype, in_place=False)


def add_low_rank(y: Tensor, x: Tensor, adapters: Sequence[Adapter], in_place: bool = False) -> Tensor:
    """Return y plus the low-rank paths of x, for a layer y = f(x) with a backward pass of its own.

    Prefer `Projection.dense` where it applies: there dx is one tensor, here it is the sum of two.

    Args:
        y: [..., out], the output of the layer.
        x: [..., in], its input.
        adapters: the paths.
        in_place: write into y. Only safe if y has no other users and the layer's backward does not read it; a
            view is copied anyway.

    Returns:
        [..., out], in y's dtype.
    """
    if torch.compiler.is_compiling():
        for adapter in adapters:
            y = y + _plain_path(x, adapter, y.dtype)
        return y
    paths = Projection(cast(Tensor, None), None, tuple(adapters))  # its product is y
    writable = y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
    return run_low_rank(x, y, (paths,), y.dtype, in_place and writable)


def plain_low_rank_linear(x: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """Plain twin of `low_rank_linear` in torch's own operations, without memory savings."""
    x, weight = x.to(dtype), projection.weight
    weight = (weight if projection.dense is None else projection.dense(weight)).to(dtype)
    if projection.float8 is not None:
        y = float8_linear(x, weight, projection.bias, projection.float8)
    else:
        y = F.linear(x, weight, as_wide_as(weight, projection.bias))
    for adapter in projection.adapters:
        y = y + _plain_path(x, adapter, dtype)
    return y


def projection_of(layer: nn.Module) -> Projection | None:
    """Describe a layer for `low_rank_linear`. Returns None if the layer must be called instead: it is not a
    linear layer, its forward is replaced, it has hooks, or it rounds its operands.

    A layer with paths describes itself: `low_rank_projection()` returns a `Projection` or None.
    """
    if has_hooks(layer) or is_ternary(layer):
        return None
    own = getattr(layer, "low_rank_projection", None)
    if own is not None:
        return own()
    if type(layer).forward not in (nn.Linear.forward, Linear.forward):
        return None
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    rows = None
    if isinstance(weight, GatheredWeight) and not weight.one_scale:
        rows = attrgetter("rows")
    elif type(weight) is not nn.Parameter:
        return None  # sharded, quantised, parametrized
    if not (bias is None or type(bias) is nn.Parameter) or getattr(layer, "unbiased", None):
        return None
    return Projection(weight, bias, float8=getattr(layer, "float8", None), rows=rows)


def _plain_path(x: Tensor, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    t = F.linear(F.dropout(x.to(dtype), adapter.dropout), adapter.a.to(dtype))
    return F.linear(t, adapter.b.to(dtype)) * adapter.scale
