"""Attention by torch's own kernels whose forward pass runs once, although its layer runs twice.

The operators and their gradients are those that `scaled_dot_product_attention` and autograd call, so results
have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from liger_models.kernels._dispatch import once_differentiable
from liger_models.kernels.attention.flash_attention import Once
from liger_models.layers.attention.reach import within_reach

_aten = torch.ops.aten


def attend_once(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, once: Once) -> Tensor:
    """Attention of q [batch, heads, queries, dim] to k, v [batch, kv_heads, keys, dim] without a mask or
    dropout: cuDNN's kernel on a GPU, torch's flash kernel on a CPU. `once` returns the output and what the
    kernel keeps for its backward pass.
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


def chooses_flash_on_a_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> bool:
    """Whether `scaled_dot_product_attention` runs the flash kernel on a CPU for these operands."""
    if q.device.type != "cpu":
        return False
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)
