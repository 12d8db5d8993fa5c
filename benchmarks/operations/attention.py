"""Attention over documents of equal and unequal lengths, against torch's three implementations and
flash-attn-4.

Ours and varlen take document boundaries; the others take equal documents as rows, FlexAttention unequal ones
with a mask, and flash-attn-4 like varlen.

Work is proportional to the visible scores: the forward pass has two products of them, the backward pass five,
since it recomputes the scores (Dao, 2022, arXiv:2205.14135, appendix B). Four of the seven have the width of
keys, three that of values.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.core import Case, Cost, Provider, Tensors, Unavailable, normal, operation
from liger_models import kernels

PROVIDERS = ("ours", "SDPA", "FlexAttention", "varlen", "flash-attn-4")
DIMS = "documents x length x heads x kv heads x head size"
PACKED_DIMS = DIMS.replace("length", "mean length")
LATENT_DIMS = f"{DIMS} x value size"
TINY = (2, 24, 4, 2, 16)
LATENT_TINY = (2, 24, 4, 4, 24, 16)
LLAMA = ((8, 4096, 32, 8, 128),)
DEEPSEEK = ((2, 4096, 128, 128, 192, 128),)  # V3, whose values are narrower than its keys
# One sequence a row, many short documents, and Gemma 2's head size.
PLAIN = (*LLAMA, (64, 512, 32, 8, 128), (8, 4096, 16, 8, 256))


@dataclass(frozen=True)
class _Form:
    """Parameters of all providers in addition to the operands."""

    lengths: tuple[int, ...]  # of the documents
    window: int | None
    softcap: float | None
    sinks: bool
    equal_heads: bool  # values have the size of keys
    device: torch.device

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    def documents(self) -> Iterator[slice]:
        return (slice(*ends) for ends in pairwise(accumulate(self.lengths, initial=0)))

    def cu_seqlens(self) -> Tensor:
        ends = list(accumulate(self.lengths, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def visible_scores(self) -> int:
        """Operations of one head."""
        seen = [(length, min(self.window or length, length)) for length in self.lengths]
        return sum(near * (near + 1) // 2 + (length - near) * near for length, near in seen)


def unequal_lengths(documents: int, mean: int) -> tuple[int, ...]:
    """From half the mean to one and a half of it, in no order."""
    if documents == 1:
        return (mean,)
    steps = [mean * (0.5 + i / (documents - 1)) for i in range(documents)]
    ends = [round(end) for end in accumulate(steps, initial=0)]
    lengths = [end - start for start, end in pairwise(ends)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


@operation("attention_sinks", DIMS, LLAMA, TINY, providers=PROVIDERS, sinks=True)
@operation("attention_softcap", DIMS, LLAMA, TINY, providers=PROVIDERS, softcap=4.0)
@operation("attention_window", DIMS, LLAMA, TINY, providers=PROVIDERS, windowed=True)
@operation("attention_packed", PACKED_DIMS, PLAIN[:2], TINY, providers=PROVIDERS, packed=True)
@operation("attention_latent", LATENT_DIMS, DEEPSEEK, LATENT_TINY, providers=PROVIDERS)
@operation("attention_latent_packed", LATENT_DIMS, DEEPSEEK, LATENT_TINY, providers=PROVIDERS, packed=True)
@operation("attention", DIMS, PLAIN, TINY, small=(1, 512, 32, 8, 128), providers=PROVIDERS)
def _attention(shape, dtype, device, packed=False, windowed=False, softcap=None, sinks=False):
    """A window is a quarter of the length. Packed documents have unequal lengths."""
    documents, length, heads, kv_heads, head_dim, *rest = shape
    value_dim = rest[0] if rest else head_dim
    lengths = unequal_lengths(documents, length) if packed else (length,) * documents
    window = length // 4 if windowed else None
    form = _Form(lengths, window, softcap, sinks, head_dim == value_dim, device)
    q, dout = (normal((form.tokens, heads, size), dtype, device) for size in (head_dim, value_dim))
    k, v = (normal((form.tokens, kv_heads, size), dtype, device) for size in (head_dim, value_dim))
    # Scores of a soft cap's order and sinks of a log-sum-exp's, so that they matter.
    q = q * (1.0 if softcap is None else softcap / 2)
    leaves = (q, k, v, normal((heads,), dtype, device) + log(length)) if sinks else (q, k, v)
    scores = 2 * form.visible_scores() * heads
    builders = {
        "ours": _ours,
        "SDPA": _sdpa,
        "FlexAttention": _flex_attention,
        "varlen": _varlen,
        "flash-attn-4": _flash_attn,
    }
    return Case(
        leaves,
        (dout,),
        {name: partial(build, form) for name, build in builders.items()},
        truth=lambda: _truth(leaves, dout, form),
        forward=Cost(flops=scores * (head_dim + value_dim)),
        training=Cost(flops=scores * (4 * head_dim + 3 * value_dim)),
    )


def _ours(form: _Form) -> Provider:
    # Document boundaries are computed once for all layers, like the others' masks.
    bounds = kernels.document_bounds(form.cu_seqlens(), form.tokens)

    def attend(q, k, v, sinks=None):
        options = {"window": form.window, "softcap": form.softcap, "sinks": sinks}
        return kernels.attention(q, k, v, bounds=bounds, **options)

    return Provider(attend)


def _sdpa(form: _Form) -> Provider:
    if not form.equal or form.window or form.softcap or form.sinks:
        raise Unavailable("has no packed documents, windows, soft caps or sinks without a mask in memory")
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return Provider(partial(_in_rows, len(form.lengths), attend))


def _varlen(form: _Form) -> Provider:
    if form.softcap or form.sinks:
        raise Unavailable("has no soft caps or sinks")
    if not form.equal_heads:
        raise Unavailable("requires values of the keys' size")
    from torch.nn.attention.varlen import varlen_attn

    options = {"window_size": (-1 if form.window is None else form.window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    cu_seqlens = form.cu_seqlens()
    bounds = cu_seqlens, cu_seqlens, max(form.lengths), max(form.lengths)
    return Provider(lambda q, k, v: varlen_attn(q, k, v, *bounds, **options))


def _flash_attn(form: _Form) -> Provider:
    """With deterministic gradients."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"causal": True, "softcap": form.softcap or 0.0, "deterministic": True}
    if form.window is not None:
        options["window_size"] = (form.window - 1, 0)
    rows = len(form.lengths)
    if not form.equal:
        for of in ("q", "k"):
            options |= {f"cu_seqlens_{of}": form.cu_seqlens(), f"max_seqlen_{of}": max(form.lengths)}

    def attend(q, k, v, sinks=None):
        if not form.equal:
            return flash_attn_varlen_func(q, k, v, learnable_sink=sinks, **options)[0]
        q, k, v = (x.unflatten(0, (rows, -1)) for x in (q, k, v))
        return flash_attn_func(q, k, v, learnable_sink=sinks, **options)[0].flatten(0, 1)

    return Provider(attend, note="the tanh of its soft cap has 11 bits" if form.softcap else "")


def _flex_attention(form: _Form) -> Provider:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, softcap = form.window, form.softcap
    rows = len(form.lengths) if form.equal else 1
    document = None
    if not form.equal:
        lengths = torch.tensor(form.lengths, device=form.device)
        document = torch.arange(len(lengths), device=form.device).repeat_interleave(lengths)

    def visible(batch, head, query, key):
        visible = query >= key
        if window is not None:
            visible = visible & (query - key < window)
        return visible if document is None else visible & (document[query] == document[key])

    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    length = form.tokens // rows
    mask = create_block_mask(visible, None, None, length, length, device=form.device)
    options = {"block_mask": mask, "enable_gqa": True, "score_mod": capped if softcap else None}

    def attend(q, k, v, sinks=None):
        if sinks is None:
            return flex_attention(q, k, v, **options)
        # A sink adds exp(sink) to the denominator exp(lse).
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

    torch._dynamo.reset()
    attend = torch.compile(attend, dynamic=False)
    note = "" if form.equal else "its mask of documents is made before, untimed"
    return Provider(partial(_in_rows, rows, attend), note=note)


def _in_rows(rows: int, attend, q, k, v, *sinks) -> Tensor:
    """Call attend with views [rows, heads, length, D] of [T, heads, D], and convert its result back."""
    q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, *sinks).transpose(1, 2).flatten(0, 1)


def _truth(leaves: Tensors, dout: Tensor, form: _Form) -> Tensors:
    """Output and gradients in float64, of one document and one head of keys at a time."""
    q, k = leaves[:2]
    groups = q.shape[1] // k.shape[1]
    results = [torch.zeros(x.shape, device=x.device) for x in (dout, *leaves)]
    for tokens in form.documents():
        place = torch.arange(tokens.stop - tokens.start, device=q.device)
        distance = place[:, None] - place
        hidden = (distance < 0) | (distance >= (form.window or len(place)))
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
