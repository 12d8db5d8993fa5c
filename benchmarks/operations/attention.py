"""Attention over packed documents of one length, beside torch's three implementations.

Work is counted by the scores that a query may see: the forward pass has two products of them, the backward
pass five, since it makes the scores again (Dao, 2022, arXiv:2205.14135, appendix B).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.core import Case, Cost, Provider, Tensors, Unavailable, normal, operation
from liger_models import kernels

PROVIDERS = ("ours", "SDPA", "FlexAttention", "varlen")
DIMS = "documents x length x heads x kv heads x head size"
TINY = (2, 24, 4, 2, 16)
LLAMA = ((8, 4096, 32, 8, 128),)
# One sequence a row, many short documents, and Gemma 2's head size.
PLAIN = (*LLAMA, (64, 512, 32, 8, 128), (8, 4096, 16, 8, 256))


@dataclass(frozen=True)
class _Form:
    """What is asked of all providers beside the operands."""

    documents: int
    length: int
    window: int | None
    softcap: float | None
    sinks: bool
    device: torch.device

    def cu_seqlens(self) -> Tensor:
        tokens = self.documents * self.length
        return torch.arange(0, tokens + 1, self.length, dtype=torch.int32, device=self.device)

    def visible_scores(self) -> int:
        """Of one head."""
        seen = min(self.window or self.length, self.length)
        return self.documents * (seen * (seen + 1) // 2 + (self.length - seen) * seen)


@operation("attention_sinks", DIMS, LLAMA, TINY, providers=PROVIDERS, sinks=True)
@operation("attention_softcap", DIMS, LLAMA, TINY, providers=PROVIDERS, softcap=4.0)
@operation("attention_window", DIMS, LLAMA, TINY, providers=PROVIDERS, windowed=True)
@operation("attention", DIMS, PLAIN, TINY, small=(1, 512, 32, 8, 128), providers=PROVIDERS)
def _attention(shape, dtype, device, windowed=False, softcap=None, sinks=False):
    """A window is a quarter of the length."""
    documents, length, heads, kv_heads, head_dim = shape
    form = _Form(documents, length, length // 4 if windowed else None, softcap, sinks, device)
    q, dout = (normal((documents * length, heads, head_dim), dtype, device) for _ in range(2))
    k, v = (normal((documents * length, kv_heads, head_dim), dtype, device) for _ in range(2))
    # Scores of a soft cap's order and sinks of a log-sum-exp's, so that they matter.
    q = q * (1.0 if softcap is None else softcap / 2)
    leaves = (q, k, v, normal((heads,), dtype, device) + log(length)) if sinks else (q, k, v)
    product = 2 * form.visible_scores() * heads * head_dim
    builders = {"ours": _ours, "SDPA": _sdpa, "FlexAttention": _flex_attention, "varlen": _varlen}
    return Case(
        leaves,
        (dout,),
        {name: partial(build, form) for name, build in builders.items()},
        truth=lambda: _truth(leaves, dout, form),
        forward=Cost(flops=2 * product),
        training=Cost(flops=7 * product),
    )


def _ours(form: _Form) -> Provider:
    # Where documents begin and end is worked out once for all layers, as the others' masks are.
    bounds = kernels.document_bounds(form.cu_seqlens(), form.documents * form.length)

    def attend(q, k, v, sinks=None):
        options = {"window": form.window, "softcap": form.softcap, "sinks": sinks}
        return kernels.attention(q, k, v, bounds=bounds, **options)

    return Provider(attend)


def _sdpa(form: _Form) -> Provider:
    if form.window or form.softcap or form.sinks:
        raise Unavailable("has no windows, soft caps or sinks without a mask in memory")
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return Provider(lambda *leaves: _by_document(form, attend, *leaves))


def _varlen(form: _Form) -> Provider:
    if form.softcap or form.sinks:
        raise Unavailable("has no soft caps or sinks")
    from torch.nn.attention.varlen import varlen_attn

    options = {"window_size": (-1 if form.window is None else form.window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    cu_seqlens = form.cu_seqlens()
    bounds = cu_seqlens, cu_seqlens, form.length, form.length
    return Provider(lambda q, k, v: varlen_attn(q, k, v, *bounds, **options))


def _flex_attention(form: _Form) -> Provider:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, softcap = form.window, form.softcap

    def visible(batch, head, query, key):
        sees = query >= key
        return sees if window is None else sees & (query - key < window)

    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    mask = create_block_mask(visible, None, None, form.length, form.length, device=form.device)
    options = {"block_mask": mask, "enable_gqa": True, "score_mod": capped if softcap else None}

    def attend(q, k, v, sinks=None):
        if sinks is None:
            return flex_attention(q, k, v, **options)
        # A sink adds exp(sink) to the denominator exp(lse).
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

    torch._dynamo.reset()
    attend = torch.compile(attend, dynamic=False)
    return Provider(lambda *leaves: _by_document(form, attend, *leaves))


def _by_document(form: _Form, attend, q, k, v, *sinks) -> Tensor:
    """attend takes views [documents, heads, length, D] of [T, heads, D]; its result comes back likewise."""
    q, k, v = (x.unflatten(0, (form.documents, form.length)).transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, *sinks).transpose(1, 2).flatten(0, 1)


def _truth(leaves: Tensors, dout: Tensor, form: _Form) -> Tensors:
    """Output and gradients in float64, of one document and one head of keys at a time."""
    q, k = leaves[:2]
    groups = q.shape[1] // k.shape[1]
    length = form.length
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = (distance < 0) | (distance >= (form.window or length))
    results = [torch.zeros(x.shape, device=x.device) for x in (dout, *leaves)]
    for start in range(0, len(q), length):
        tokens = slice(start, start + length)
        for kv_head in range(k.shape[1]):
            heads = slice(kv_head * groups, (kv_head + 1) * groups)
            places = [(tokens, heads), (tokens, heads), (tokens, kv_head), (tokens, kv_head), heads]
            parts = [x[place].double().requires_grad_() for x, place in zip(leaves, places[1:], strict=False)]
            out = _one_head(*parts, hidden=hidden, softcap=form.softcap)
            gradients = torch.autograd.grad(out, parts, dout[tokens, heads].double())
            for result, place, part in zip(results, places, (out.detach(), *gradients), strict=False):
                result[place] += part.float()
    return tuple(results)


def _one_head(q, k, v, sink=None, *, hidden, softcap):
    """q [S, groups, D], k, v [S, D], sink [groups] -> [S, groups, D]"""
    scores = torch.einsum("qgd,kd->gqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:  # one more key, without a value
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("gqk,kd->qgd", weights, v)
