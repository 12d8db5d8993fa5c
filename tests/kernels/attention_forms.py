"""Operands of attention and an eager implementation of it, for the tests of attention."""

import torch

from liger_models.kernels import attention, document_bounds
from liger_models.kernels.attention.visible_keys import visible_keys


def operands(
    tokens, heads=4, kv_heads=2, dim=8, sinks=False, dtype=torch.float32, device="cpu", value_dim=None
):
    """q, k, v and, if asked for, sinks. `value_dim` defaults to the width of a key."""
    shapes = [(tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, value_dim or dim)]
    shapes += [(heads,)] if sinks else []
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def attend(options, function=attention):
    """The operation with these options, as a function of q, k, v and, optionally, sinks."""

    def run(q, k, v, sinks=None):
        cu_seqlens = options.get("cu_seqlens")
        if cu_seqlens is not None:
            cu_seqlens = torch.tensor(cu_seqlens, device=q.device)
        slopes = options.get("slopes")
        if slopes is not None:
            slopes = torch.tensor(slopes, dtype=torch.float32, device=q.device)
        return function(q, k, v, **{**options, "cu_seqlens": cu_seqlens, "slopes": slopes}, sinks=sinks)

    return run


def eager_attention(q, k, v, *, softcap=None, sinks=None, **options):
    """The plain twin, except that it rounds everything to q's dtype, as models in transformers do."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * options.get("scale", q.shape[2] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if options.get("slopes") is not None:
        places = torch.arange(len(q), device=q.device)
        scores = (scores + options["slopes"][:, None, None] * (places - places[:, None])).to(q.dtype)
    bounds = options.get("bounds")
    if options.get("cu_seqlens") is not None:
        bounds = document_bounds(options["cu_seqlens"], len(q))
    visible = visible_keys(len(q), bounds, options.get("window"), q.device)
    scores = scores.masked_fill(~visible, torch.finfo(q.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : len(q)]
    return (weights @ v).transpose(0, 1)
