"""The loss of an indexer: how far its choice of keys is from the attention of its layer.

    s_qk = sum_h weights_qh relu(scale * q_qh . k_k)                the indexer's scores (chosen_keys.py)
    p_qk = mean over the layer's heads of its attention weights, over the chosen keys
    loss = sum over queries q of KL(p_q || softmax(s_q)) = sum_qk p_qk (log p_qk - log softmax(s_q)_k)

Both distributions are over the keys that the query attends to: the chosen ones, or all that it sees
(DeepSeek-V3.2, 2025, arXiv:2512.02556, equations 3 and 4). p is a constant, so

    ds_qk = softmax(s_q)_k - p_qk,   dweights_qh = sum_k ds_qk r_qhk,   r_qhk = relu(scale * q_qh . k_k)
    dq_qh = scale * sum_k ds_qk weights_qh [r_qhk > 0] k_k,             and dk_k likewise, over q and h

The gradients are computed with the loss, for a slice of queries at a time and a head at a time, in float32.
So no scores are kept for the backward pass, and no more than four matrices of a slice exist at once. All
products are torch's: 2 T E operations per query and head of the layer, 8 T D per head of the indexer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.kernels.attention.chosen_keys import index_scores

_SLICE = 1 << 23  # scores of a slice of queries: 32 MiB


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    *,
    scale: float,
    attention_scale: float,
    bounds: Tensor | None = None,
    chosen: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Sum the divergence of the indexer's distribution from the attention's over all queries.

    Args:
        q: [T, heads, D], k: [T, D], weights: [T, heads], of the indexer.
        attention_q: [T, H, E], attention_k: [T, H, E] (any divisor of H heads), of the layer; constants.
        scale, attention_scale: of the products.
        bounds: [2, T] int32 from `document_bounds`; None: one document.
        chosen: [T, words] int32 from `choose_keys`; None: queries attend to all keys of their document up to
            their own.
        longest: the length of the longest document, or more; None: T.

    Returns:
        A scalar in at least float32, differentiable once with respect to q, k and weights.
    """
    options = scale, attention_scale, bounds, chosen, len(k) if longest is None else longest
    return _IndexerLoss.apply(q, k, weights, attention_q.detach(), attention_k.detach(), options)


def indexer_loss_plain(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    attention_q: Tensor,
    attention_k: Tensor,
    *,
    scale: float,
    attention_scale: float,
    seen: Tensor,
) -> Tensor:
    """Plain twin of `indexer_loss`: `seen` [T, T] are the keys (columns) that a query attends to."""
    repeated = attention_k.repeat_interleave(attention_q.shape[1] // attention_k.shape[1], 1)
    products = torch.einsum("qhe,khe->hqk", attention_q, repeated) * attention_scale
    p = products.masked_fill(~seen, float("-inf")).softmax(-1).mean(0).detach()
    scores = index_scores(q, k, weights, scale).masked_fill(~seen, float("-inf"))
    log_ratio = (p.log() - scores.log_softmax(-1)).masked_fill(~seen | (p == 0), 0.0)
    return (p * log_ratio).sum()


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        attention_q: Tensor,
        attention_k: Tensor,
        options: tuple[Any, ...],
    ) -> Tensor:
        scale, attention_scale, bounds, chosen, longest = options
        tokens, wanted = len(k), any(ctx.needs_input_grad[:3])
        wide = [at_least_float32(x) for x in (q, k, weights)]
        loss = wide[0].new_zeros(())
        grads = [torch.zeros_like(x) for x in wide] if wanted else []
        rows = max(1, _SLICE // max(1, longest))
        for start in range(0, tokens, rows):
            part = slice(start, min(start + rows, tokens))
            keys = slice(max(0, start - longest + 1), part.stop)  # no query sees an earlier one
            seen = _seen(part, keys, bounds, chosen, q.device)
            p = _mean_weights(attention_q[part], attention_k[keys], attention_scale, seen)
            own = wide[0][part], wide[1][keys], wide[2][part]
            scores = index_scores(*own, scale).masked_fill_(~seen, float("-inf"))
            log_found = scores.log_softmax(-1)
            del scores
            terms = p * (p.log() - log_found)
            loss += terms.masked_fill_(~seen | (p == 0), 0.0).sum()  # no weight: no term, in the limit
            del terms
            if wanted:
                _add_gradients(grads, part, keys, own, log_found.exp_() - p, scale)
        kept = [g.to(x.dtype) for g, x in zip(grads, (q, k, weights), strict=True)] if wanted else []
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors or (None,) * 3
        needed = ctx.needs_input_grad[:3]
        found = [(dloss * g).to(g.dtype) if want else None for g, want in zip(grads, needed, strict=True)]
        return *found, None, None, None


def _seen(
    queries: slice, keys: slice, bounds: Tensor | None, chosen: Tensor | None, device: torch.device
) -> Tensor:
    """Mask of the keys (columns) that each query (row) attends to."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    first = torch.zeros_like(query) if bounds is None else bounds[0, queries][:, None]
    seen = (key >= first) & (key <= query)
    if chosen is None:
        return seen
    word = (key // 32 - first // 32).clamp(0, chosen.shape[1] - 1)
    return seen & ((chosen[queries].gather(1, word.long()) >> (key % 32)) & 1).bool()


def _mean_weights(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Mean of the attention weights over the heads, [queries, keys]: a head at a time."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    hidden, total = ~seen, None
    for head in range(heads):
        products = at_least_float32(q[:, head]) @ at_least_float32(k[:, head // group]).T
        weights = products.mul_(scale).masked_fill_(hidden, float("-inf")).softmax(-1)
        total = weights if total is None else total.add_(weights)
    assert total is not None
    return total.div_(heads)


def _add_gradients(
    grads: list[Tensor],
    queries: slice,
    keys: slice,
    own: tuple[Tensor, Tensor, Tensor],
    dscores: Tensor,
    scale: float,
) -> None:
    """Add the gradients of a slice of queries to those of q, k and weights."""
    q, k, weights = own
    dq, dk, dweights = grads[0][queries], grads[1][keys], grads[2][queries]
    for head in range(q.shape[1]):
        products = torch.relu_(q[:, head] @ k.T * scale)
        dweights[:, head] = (dscores * products).sum(-1)
        dproducts = (dscores * weights[:, head, None]).masked_fill_(products == 0, 0.0).mul_(scale)
        dq[:, head] = dproducts @ k
        dk += dproducts.T @ q[:, head]
