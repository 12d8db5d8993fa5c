"""Limits of torch's attention kernels, and attention of larger tensors in parts.

Their offsets have 32 bits in places, with nothing that checks them:

- cuDNN's backward pass (9.19, measured on an H200) addresses attention's output and its gradient with 32
  bits: with elements further apart, the gradients of queries and keys are wrong, silently.
- FlashAttention 2's backward pass numbers its float32 sums of the queries' gradient with 32 bits, in rows
  rounded up to 128 and heads rounded up to a multiple of 32 or 64: an illegal memory access.
- The memory-efficient kernel multiplies a key's number by its stride in 32 bits, and numbers the weights to
  drop with 32 bits: the backward pass drops others than the forward pass, silently (pytorch 188015).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.layers.recompute.eager import not_compiled

REACH = 1 << 31
"""Elements, or weights to drop, that a call may have."""


def is_within_reach(q: Tensor, v: Tensor, dropout: float = 0.0, more: int = 0) -> bool:
    """Whether torch's kernels address all elements of attention of q [batch, heads, queries, dim] to v
    [batch, kv_heads, keys, dim], if its gradients are contiguous. `more`: queries by which documents are
    padded.
    """
    if torch.compiler.is_compiling() and q.shape[2] * q.stride(2) > REACH:
        return False  # the gradient may be a part of rows as long as those of q
    return _size(q, v, dropout, more) <= REACH


def _size(q: Tensor, v: Tensor, dropout: float, more: int) -> int:
    batch, heads, queries, dim = q.shape
    elements = batch * heads * (_up(queries, 128) + more) * _up(max(dim, v.shape[-1]), 64)
    return max(elements, batch * heads * queries * v.shape[2] if dropout else 0)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _attend_in_parts(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    more: int = 0,
) -> Tensor:
    """`attend(q, k, v)` with as many rows of the batch, else key heads, else query heads at a time as torch's
    kernels address. Under torch.compile it breaks the graph: compiled code chooses the strides of gradients.

    Args:
        attend: attention of q [batch, heads, queries, dim] to k, v [batch, kv_heads, keys, dim].
        dropout: its probability of dropping a weight.
        more: as of `is_within_reach`.

    Raises:
        ValueError: one head has more elements, or more weights to drop, than they address.
    """
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    if batch > 1:
        dim, count, sizes = 0, batch, (1, 1, 1)
    elif groups > 1:
        dim, count, sizes = 1, groups, (heads // groups, 1, 1)
    elif heads > 1:
        dim, count, sizes = 1, heads, (1, 0, 0)  # of one key head, shared by all
    else:
        _check_one_head(q, v, dropout, more)
        return attend(q, k, v)
    some = max(1, REACH * count // _size(q, v, dropout, more))
    found = []
    for first in range(0, count, some):
        a, b, c = (
            x.narrow(dim, first * size, min(some, count - first) * size) if size else x
            for x, size in zip((q, k, v), sizes, strict=True)
        )
        whole = is_within_reach(a, c, dropout, more)
        found.append(attend(a, b, c) if whole else _attend_in_parts(attend, a, b, c, dropout, more))
    return torch.cat(found, dim)


attend_in_parts = not_compiled(
    _attend_in_parts, "attention of more than 2^31 elements runs eagerly, in parts: leave out fullgraph=True"
)


def _check_one_head(q: Tensor, v: Tensor, dropout: float, more: int) -> None:
    queries, keys, width = q.shape[2], v.shape[2], max(q.shape[-1], v.shape[-1])
    elsewhere = "use shorter rows, or divide them over ranks"
    if _size(q, v, 0.0, more) > REACH:
        raise ValueError(
            f"one attention head has {queries} queries of {width} elements, and torch's kernels address "
            f"{REACH} elements: {elsewhere}, or use attention='triton'"
        )
    # The first head's weights are numbered right up to 2^32, and by the kernels for 16 bits beyond.
    if dropout and q.dtype.itemsize > 2 and queries * keys > 2 * REACH:
        raise ValueError(
            f"dropout of {queries} x {keys} weights of one attention head: torch's kernel for {q.dtype} "
            f"numbers {2 * REACH}: {elsewhere}, or use bfloat16 or no dropout"
        )


def with_gradient_in_reach(out: Tensor) -> Tensor:
    """Attention's output [batch, heads, queries, dim], whose gradient arrives `within_reach`."""
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(within_reach)
    return out


def within_reach(gradient: Tensor) -> Tensor:
    """The gradient of attention's output [batch, heads, queries, dim], copied if it is a view with elements
    that the backward passes do not reach, such as some heads of a long row.
    """
    return gradient if _span(gradient) < REACH else gradient.transpose(1, 2).contiguous().transpose(1, 2)


def dense(x: Tensor) -> Tensor:
    """Queries, keys or values [batch, heads, tokens, dim], copied if tokens of a head are too far apart for
    the memory-efficient kernel.
    """
    return x if x.shape[2] * x.stride(2) < REACH else x.contiguous()


def _span(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
