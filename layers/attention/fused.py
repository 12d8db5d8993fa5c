"""Attention by torch's own kernels, each called directly as an operator.

`scaled_dot_product_attention` chooses a kernel by flags and an order of preference that all code in the
process shares. `torch.nn.attention.sdpa_kernel` changes them while it runs, and its `set_priority` can change
them permanently: torch puts cuDNN first at the first attention on a GPU, and a context entered before that
restores the earlier order, which slows down every other model in the process. So this module calls the kernel
it wants and sets nothing. It asks torch whether the kernel can run, which respects what the user disabled.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend

from liger_models.kernels._dispatch import has_matrix_units, once_differentiable
from liger_models.kernels.attention.flash_attention import Once
from liger_models.layers.attention.reach import (
    REACH,
    attend_in_parts,
    dense,
    is_within_reach,
    with_gradient_in_reach,
    within_reach,
)
from liger_models.layers.specs import AttentionSpec

_aten = torch.ops.aten
_16_BITS = (torch.bfloat16, torch.float16)
_CUDNN_TILE = 128  # keys
_ALIGNMENT = 8  # elements: rows of a mask in the memory-efficient kernel start at a multiple
# The memory-efficient kernel indexes a mask with 32 bits: beyond 2^32 queries x keys, in some versions of its
# backward pass beyond 2^31, it silently reads the mask of other queries (pytorch 187227).
_MOST_SCORES = REACH


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None, once: Once | None = None
) -> Tensor:
    """Attention of q [batch, heads, queries, dim] to k, v [batch, kv_heads, keys, dim], masked or not. For
    `once` see `unmasked_attention`.
    """
    q, k, v = _on_16_bytes(q), _on_16_bytes(k), _on_16_bytes(v)
    groups = spec.num_attention_heads // spec.num_key_value_heads
    if groups > 1 and q.shape[2] == 1 and mask is not None:
        # All queries of a group attend to the same keys, so they are queries of one head.
        q = q.unflatten(1, (spec.num_key_value_heads, groups)).squeeze(3)
        if mask.shape[1] > 1:  # heads have masks of their own
            mask = mask.unflatten(1, (spec.num_key_value_heads, groups)).squeeze(3)
        out = masked_attention(q, k, v, mask, spec.scale, spec.dropout)
        return out.flatten(1, 2).unsqueeze(2)
    unusual = mask is not None or q.dtype == torch.float32 or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256
    unusual = unusual or (q.is_cuda and not has_matrix_units(q.device))
    if groups > 1 and unusual:
        # The kernels for a mask, float32, such heads or GPUs do not support grouped heads, and the
        # fallback would keep all scores.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if mask is not None:
        return masked_attention(q, k, v, mask, spec.scale, spec.dropout)
    return unmasked_attention(q, k, v, spec.scale, spec.causal, spec.dropout, once)


def _on_16_bytes(x: Tensor) -> Tensor:
    """x, or a copy if it does not start at a multiple of 16 bytes, such as values stored after keys in a
    cache. SDPA's kernels read 16 bytes at a time without checking where a view starts.
    """
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def unmasked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    once: Once | None = None,
) -> Tensor:
    """Attention without a mask, by cuDNN if its result is right, else by another kernel of torch's; in parts
    if there are more elements than these address.

    Args:
        q: [batch, heads, queries, dim]; k, v: [batch, kv_heads, keys, dim], or values of another size.
        scale: factor of the scores.
        causal: whether a query attends only to the keys up to its own position.
        dropout: probability of dropping a weight.
        once: as of `kernels.attention`. Only cuDNN and torch's kernel for a CPU ask it, without dropout.

    Returns:
        [batch, heads, queries, the size of v's heads].

    Raises:
        ValueError: one head has more elements than torch's kernels address.
    """
    if q.device.type == "mps":
        return _by_formula(q, k, v, None, scale, dropout, causal)
    if q.is_cuda and not is_within_reach(q, v, dropout):
        attend = functools.partial(_unmasked, scale=scale, causal=causal, dropout=dropout, once=once)
        return attend_in_parts(attend, q, k, v, dropout)
    return _unmasked(q, k, v, scale, causal, dropout, once)


def _unmasked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, dropout: float, once: Once | None
) -> Tensor:
    """`unmasked_attention` that a kernel takes at once."""
    once = None if dropout or torch.compiler.is_compiling() else once
    if q.is_cuda and not torch.compiler.is_compiling():
        q, k, v = _under_autocast(q, k, v)
        if cudnn_takes(q, k, v, causal):
            return _by_cudnn(q, k, v, scale, causal, dropout, once)
        q, k, v = dense(q), dense(k), dense(v)
        if _spoils_gradients(k, causal) and not dropout:
            return with_gradient_in_reach(_without_cudnn(q, k, v, scale))
    grouped = q.shape[1] != k.shape[1]
    if once is not None and _chooses_flash_on_a_cpu(q, k, v, scale, causal):
        return _attend_once(q, k, v, scale, causal, once)
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return with_gradient_in_reach(out) if q.is_cuda else out


def _by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, dropout: float, once: Once | None
) -> Tensor:
    """Attention by cuDNN."""
    if once is not None:
        return _attend_once(q, k, v, scale, causal, once)
    keep = _is_differentiated(q, k, v)
    out: Tensor = torch._scaled_dot_product_cudnn_attention(
        q, k, v, None, keep, dropout, causal, False, scale=scale
    )[0]
    return with_gradient_in_reach(out)


def _attend_once(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, once: Once) -> Tensor:
    """Attention of q [batch, heads, queries, dim] to k, v [batch, kv_heads, keys, dim] without a mask or
    dropout: cuDNN's kernel on a GPU, torch's flash kernel on a CPU. `once` returns the output and what the
    kernel keeps for its backward pass: its forward pass runs once, although its layer runs twice. The
    operators and their gradients are those that `scaled_dot_product_attention` and autograd call, so results
    have the same bits.
    """
    out: Tensor = _FusedOnce.apply(q, k, v, scale, causal, once)
    return out.transpose(1, 2)


class _FusedOnce(torch.autograd.Function):
    """Returns [batch, queries, heads, dim], the order of the kernels' output in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, once: Once) -> Tensor:
        def run() -> tuple[Tensor, ...]:
            if q.is_cuda:
                found = _aten._scaled_dot_product_cudnn_attention(
                    q, k, v, None, True, 0.0, causal, False, scale=scale
                )
                out, lse, *_, seed, offset, _ = found
                return out.transpose(1, 2).data, lse, seed, offset  # no view, which might not be edited
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
            return out.transpose(1, 2).data, lse

        out, *rest = once(run)
        ctx.save_for_backward(q, k, v, out, *rest)
        ctx.options = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        causal, scale = ctx.options
        dout, out = dout.transpose(1, 2), out.transpose(1, 2)
        if q.is_cuda:
            dout = within_reach(dout)
            none, lengths = None, (q.shape[2], k.shape[2])
            gradients = _aten._scaled_dot_product_cudnn_attention_backward(
                *(dout, q, k, v, out, lse, *random, none, none, none, *lengths, 0.0, causal), scale=scale
            )
        else:
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, scale=scale
            )
        return *gradients, None, None, None


def _chooses_flash_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> bool:
    """Whether `scaled_dot_product_attention` runs the flash kernel on a CPU for these operands."""
    if q.device.type != "cpu":
        return False
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def _by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    """Attention for MPS, in torch's own operations, which keep all scores. Its fused kernels have given wrong
    results: queries that see later keys in 16 bits (pytorch 195910), operands that are not contiguous
    (181133), values of another size (176767).
    """
    if causal:
        mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    bias = None if mask is None else q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
    grouped = q.shape[1] != k.shape[1]
    out, _ = torch._scaled_dot_product_attention_math(q, k, v, bias, dropout, scale=scale, enable_gqa=grouped)
    return out


def _spoils_gradients(k: Tensor, causal: bool) -> bool:
    """Whether cuDNN's backward pass may give NaN: it treats the keys that pad its last tile as scores of
    zero, which overflow if all scores of a query are far below zero (pytorch 196678). Causal masks hide them.
    Measured with 64 keys more than a multiple of 128.
    """
    return not causal and k.shape[2] % _CUDNN_TILE != 0


def _without_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention to all keys, by torch's fastest kernel other than cuDNN's."""
    grouped = q.shape[1] != k.shape[1]
    params = SDPAParams(q, k, v, None, 0.0, False, grouped)
    if q.shape[-1] % 8 == 0 and q.shape[-1] == v.shape[-1] and can_use_flash_attention(params):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    if grouped:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if can_use_efficient_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        keep = _is_differentiated(q, k, v)
        return torch._scaled_dot_product_efficient_attention(q, k, v, None, keep, scale=scale)[0]
    return torch._scaled_dot_product_attention_math(q, k, v, scale=scale)[0]


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention with a mask, never by cuDNN, whose backward pass has given NaN with a mask for some lengths.
    Queries are split if there are more scores than the memory-efficient kernel can index.

    Args:
        q: [batch, heads, queries, dim]; k, v: [batch, heads, keys, dim], or values of another size.
        mask: bool, true where a query attends to a key; broadcast to [batch, heads, queries, keys].
        scale: factor of the scores.
        dropout: probability of dropping a weight.

    Returns:
        [batch, heads, queries, the size of v's heads].
    """
    queries, keys = q.shape[2], k.shape[2]
    # It numbers the weights of all heads to drop them.
    scores = _aligned(keys) * (q.shape[0] * q.shape[1] if dropout else 1)
    rows = max(min(_MOST_SCORES // scores, REACH // (q.shape[1] * max(q.shape[-1], v.shape[-1]))), 1)
    if queries > rows:
        masks = mask.expand(*mask.shape[:-2], queries, keys).split(rows, dim=-2)
        pieces = zip(q.split(rows, dim=2), masks, strict=True)
        return torch.cat(
            [masked_attention(piece, k, v, part, scale, dropout) for piece, part in pieces], dim=2
        )
    if q.device.type == "mps":
        return _by_formula(q, k, v, mask, scale, dropout)
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    q, k, v = dense(q), dense(k), dense(v)
    if torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    q, k, v = _under_autocast(q, k, v)
    if q.dtype not in _16_BITS:  # cuDNN does not support it, so torch cannot choose it
        return with_gradient_in_reach(F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale))
    bias = _bias(mask, q, k)
    if can_use_efficient_attention(SDPAParams(q, k, v, bias, 0.0, False, False)):
        keep = _is_differentiated(q, k, v)
        out = torch._scaled_dot_product_efficient_attention(q, k, v, bias, keep, dropout, scale=scale)[0]
        return with_gradient_in_reach(out)
    return torch._scaled_dot_product_attention_math(q, k, v, bias, dropout, scale=scale)[0]


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention whose scores have a bias with a gradient, never by cuDNN.

    Args:
        q: [batch, heads, queries, dim]; k, v: [batch, kv_heads, keys, dim].
        bias: [batch, heads, queries, keys] in q's dtype, added to the scaled scores; -inf hides a key. Every
            query sees one.
        scale: factor of the scores.

    Returns:
        [batch, heads, queries, dim].
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if q.device.type == "mps":
        return torch._scaled_dot_product_attention_math(q, k, v, bias, scale=scale)[0]
    if not q.is_cuda or q.dtype not in _16_BITS or torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    keys = k.shape[2]
    bias = F.pad(bias, (0, _aligned(keys) - keys))[..., :keys]  # rows that start where the kernel reads
    if can_use_efficient_attention(SDPAParams(q, k, v, bias, 0.0, False, False)):
        keep = _is_differentiated(q, k, v, bias)
        return torch._scaled_dot_product_efficient_attention(q, k, v, bias, keep, scale=scale)[0]
    return torch._scaled_dot_product_attention_math(q, k, v, bias, scale=scale)[0]


def cudnn_takes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether cuDNN is enabled and right for attention without a mask; shapes as in `unmasked_attention`."""
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda or _spoils_gradients(k, causal):
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, causal, grouped))


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as an additive bias of 0 or -inf [batch, heads, queries, keys], in aligned rows."""
    keys = mask.shape[-1]
    rows = q.new_zeros(*mask.shape[:-1], _aligned(keys))
    return rows[..., :keys].masked_fill_(~mask, -math.inf).expand(*q.shape[:3], k.shape[2])


def _aligned(keys: int) -> int:
    return -(-keys // _ALIGNMENT) * _ALIGNMENT


def _is_differentiated(*operands: Tensor) -> bool:
    """Whether a backward pass may follow, which needs the log-sum-exp of the scores."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def _under_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Cast the operands as autocast does for scaled_dot_product_attention, but not for its kernels."""
    if not torch.is_autocast_enabled("cuda"):
        return operands
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)
