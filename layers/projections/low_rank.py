"""Linear layers with low-rank paths beside them (LoRA: Hu et al., 2021, arXiv:2106.09685), one operation.

    y = x W^T + b + s drop(x) A^T B^T                  x [..., in], W [out, in], A [r, in], B [out, r]
    dx = dy W + u A,   dA = u^T x,   dB = dy^T t       t = s x A^T,   u = s dy B

Several paths of one layer add up, and layers of one input (query, key and value; gate and up) are one
operation whose outputs stand side by side: x is read once for all of their t, and dx is one tensor.

Of the activations x is kept, by reference or as its recipe (layers/recompute/activation_memory.py), and t
[tokens, r]; of dropout the random state and not the mask. A and B are cast to the dtype of the product, and x
never to theirs; their gradients are summed in float32. What is frozen has no gradient, and costs nothing.

The low-rank paths come first, and the product of W is added to them: y and dx are written once more than in
the plain layer, x is read twice more (for t and dA) and dy twice (for u and dB). y is so rounded once, after
the sum, and not before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.projections.linear import Linear, as_wide_as, has_hooks
from liger_models.layers.projections.low_rank_autograd import run_low_rank
from liger_models.layers.projections.low_rank_plan import Adapter, Projection, product_dtype


def low_rank_linear(x: Tensor, *projections: Projection) -> Tensor:
    """The outputs of linear layers of one input, with their low-rank paths, side by side.

    Its backward pass does not read the output, whose memory may so be used again.

    Args:
        x: [..., in].
        projections: the layers.

    Returns:
        [..., sum of out], in the dtype of x, or in that of autocast.

    Raises:
        RuntimeError: dtypes or shapes that do not fit, as from torch's linear layer.
        ValueError: a weight that is both trained and stored in another form.
    """
    if any(p.dense is not None and p.weight.requires_grad for p in projections):
        raise ValueError("a weight with `dense` has no gradient; set its requires_grad to False")
    dtype = product_dtype(x)
    if torch.compiler.is_compiling():
        return torch.cat([plain_low_rank_linear(x, projection, dtype) for projection in projections], dim=-1)
    return run_low_rank(x, None, projections, dtype, in_place=False)


def add_low_rank(y: Tensor, x: Tensor, adapters: Sequence[Adapter], in_place: bool = False) -> Tensor:
    """y + the low-rank paths of x, for a layer y = f(x) that has a backward pass of its own.

    `Projection.dense` is the faster form where it fits: there dx is one tensor, here it is the sum of two.

    Args:
        y: [..., out], the output of the layer.
        x: [..., in], its input.
        adapters: the paths.
        in_place: write into y. Only where nobody else sees y and the layer's backward does not read it; a
            view is copied all the same.

    Returns:
        [..., out], in y's dtype.
    """
    if torch.compiler.is_compiling():
        for adapter in adapters:
            y = y + _plain_path(x, adapter, y.dtype)
        return y
    paths = Projection(cast(Tensor, None), None, tuple(adapters))  # its product is made already: y
    writable = y.is_contiguous() and not y._is_view() and not (y.is_leaf and y.requires_grad)
    return run_low_rank(x, y, (paths,), y.dtype, in_place and writable)


def plain_low_rank_linear(x: Tensor, projection: Projection, dtype: torch.dtype) -> Tensor:
    """What the operation means, in torch's own operations, which keep what they like."""
    x, weight = x.to(dtype), projection.weight
    weight = (weight if projection.dense is None else projection.dense(weight)).to(dtype)
    y = F.linear(x, weight, as_wide_as(weight, projection.bias))
    for adapter in projection.adapters:
        y = y + _plain_path(x, adapter, dtype)
    return y


def projection_of(layer: nn.Module) -> Projection | None:
    """A layer as the operation takes it, or None if it must be called: it is something else than a linear
    layer, or somebody has changed how it runs or hooked into it.

    A layer with paths says for itself what it is: `low_rank_projection()` gives a `Projection` or None.
    """
    if has_hooks(layer):
        return None
    own = getattr(layer, "low_rank_projection", None)
    if own is not None:
        return own()
    if type(layer).forward not in (nn.Linear.forward, Linear.forward):
        return None
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return None  # sharded, quantised, parametrized
    return Projection(weight, bias)


def _plain_path(x: Tensor, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    t = F.linear(F.dropout(x.to(dtype), adapter.dropout), adapter.a.to(dtype))
    return F.linear(t, adapter.b.to(dtype)) * adapter.scale
