"""The loss of an indexer: how far its choice of keys is from the attention of its layer.

    s_qk = sum_h weights_qh relu(scale * q_qh . k_k)                the indexer's scores (chosen_keys.py)
    p_qk = mean over the layer's heads of its attention weights, over the chosen keys; with sinks, which take
           a share of the weights, their sum over the heads divided by its sum over the keys
    loss = sum over queries q of KL(p_q || softmax(s_q)) = sum_qk p_qk (log p_qk - log softmax(s_q)_k)

Both distributions are over the keys that the query attends to: the chosen ones, or all that it sees
(DeepSeek-V3.2, 2025, arXiv:2512.02556, equations 3 and 4). p is a constant, so

    ds_qk = softmax(s_q)_k - p_qk,   dweights_qh = sum_k ds_qk r_qhk,   r_qhk = relu(scale * q_qh . k_k)
    dq_qh = scale * sum_k ds_qk weights_qh [r_qhk > 0] k_k,             and dk_k likewise, over q and h

The gradients are computed with the loss, for a slice of queries at a time and a head at a time, or a few
heads where there are few keys, in float32. So no scores are kept for the backward pass, and no more than four
matrices of a slice and its heads exist at once. All products are torch's: 2 T E operations per query and head
of the layer, 8 T D per head of the indexer.

A layer of DeepSeek-V4 attends to a window of tokens, compressed keys and a sink in one softmax, and its
indexer chooses among the compressed keys w alone (compressed_keys.py):

    p_qw = sum over the layer's heads of its attention weights of w / the same sum over all w

A head counts by its share of attention that reaches compressed keys. A query that sees none has no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable, without_autocast
from liger_models.kernels.attention.chosen_keys import index_scores
from liger_models.kernels.attention.compressed_keys import (
    CompressedKeys,
    blocks_of_queries,
    keys_of,
    scaled_products,
    seen_keys,
)

_SLICE = 1 << 23  # scores of a slice of queries, and of heads that run at once: 32 MiB


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
    sinks: Tensor | None = None,
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
        sinks: [H], of the layer, a constant; None: there are none.

    Returns:
        A scalar in at least float32, differentiable once with respect to q, k and weights.
    """
    longest = len(k) if longest is None else longest
    layer = attention_q.detach(), attention_k.detach(), attention_scale
    sinks = None if sinks is None else sinks.detach()

    def targets() -> Iterator[_Target]:
        rows = max(1, _SLICE // max(1, longest))
        for start in range(0, len(k), rows):
            part = slice(start, min(start + rows, len(k)))
            keys = slice(max(0, start - longest + 1), part.stop)  # no query sees an earlier one
            seen = _seen(part, keys, bounds, chosen, q.device)
            yield _Target(part, keys, _mean_weights(*layer, sinks, part, keys, seen), seen)

    with without_autocast(q):
        loss: Tensor = _IndexerLoss.apply(q, k, weights, scale, targets)
    return loss


def compressed_indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    attention_q: Tensor,
    keys: Tensor,
    compressed: Tensor,
    sinks: Tensor,
    places: CompressedKeys,
    *,
    scale: float,
    attention_scale: float,
    window: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Sum the divergence of the indexer's distribution over compressed keys from the attention's over all
    queries.

    Args:
        q: [T, heads, D], k: [W, D], weights: [T, heads], of the indexer.
        attention_q: [T, H, E], keys: [T, E], compressed: [W, E], sinks: [H], of the layer; constants.
        places: of the compressed keys, and the documents.
        scale, attention_scale: of the products.
        window: number of tokens that a query of the layer sees, its own included.
        chosen: [T, n] int32 from `choose_compressed`; None: queries attend to all that they see.

    Returns:
        A scalar in at least float32, differentiable once with respect to q, k and weights.
    """
    dtype = attention_q.dtype  # autocast may leave some of the layer's tensors in another one
    attention_q, keys, compressed = (x.detach().to(dtype) for x in (attention_q, keys, compressed))
    sinks = sinks.detach()

    def targets() -> Iterator[_Target]:
        for block in blocks_of_queries(places, 4, window):
            if block.compressed[0] == block.compressed[1]:
                continue
            rows, columns = slice(block.first, block.last), slice(*block.compressed)
            seen = seen_keys(block, places, window, chosen, q.device)
            among = seen[:, block.last - block.key :]
            every = keys_of(block, keys, compressed)
            p = _shares_of_compressed(attention_q[rows], every, sinks, attention_scale, seen, among)
            yield _Target(rows, columns, p, among)

    with without_autocast(q):
        loss: Tensor = _IndexerLoss.apply(q, k, weights, scale, targets)
    return loss


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain twin of `indexer_loss`: `seen` [T, T] are the keys (columns) that a query attends to."""
    repeated = attention_k.repeat_interleave(attention_q.shape[1] // attention_k.shape[1], 1)
    products = torch.einsum("qhe,khe->hqk", attention_q, repeated) * attention_scale
    products = products.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        products = torch.cat([products, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    p = products.softmax(-1)[..., : len(k)].sum(0)
    p = (p / p.sum(-1, keepdim=True)).detach()
    scores = index_scores(q, k, weights, scale).masked_fill(~seen, float("-inf"))
    log_ratio = (p.log() - scores.log_softmax(-1)).masked_fill(~seen | (p == 0), 0.0)
    return (p * log_ratio).sum()


class _Target(NamedTuple):
    """The attention weights p [queries, keys] of a slice of queries, zero for keys that are not `seen`."""

    queries: slice
    keys: slice
    p: Tensor
    seen: Tensor


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        scale: float,
        targets: Callable[[], Iterator[_Target]],
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:3])
        wide = [at_least_float32(x) for x in (q, k, weights)]
        loss = wide[0].new_zeros(())
        grads = [torch.zeros_like(x) for x in wide] if wanted else []
        for part, keys, p, seen in targets():
            own = wide[0][part], wide[1][keys], wide[2][part]
            hidden = ~seen
            scores = _scores(*own, scale).masked_fill_(hidden, float("-inf"))
            log_found = scores.log_softmax(-1)
            del scores
            terms = p * (p.log() - log_found)
            loss += terms.masked_fill_(hidden | (p == 0), 0.0).sum()  # no weight: no term, in the limit
            del terms
            if wanted:
                dscores = (log_found.exp_() - p).masked_fill_(hidden, 0.0)  # also of queries without keys
                _add_gradients(grads, part, keys, own, dscores, scale)
        kept = [g.to(x.dtype) for g, x in zip(grads, (q, k, weights), strict=True)] if wanted else []
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors or (None,) * 3
        needed = ctx.needs_input_grad[:3]
        found = [(dloss * g).to(g.dtype) if want else None for g, want in zip(grads, needed, strict=True)]
        return *found, None, None


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


def _mean_weights(
    q: Tensor,
    k: Tensor,
    scale: float,
    sinks: Tensor | None,
    queries: slice,
    keys: slice,
    seen: Tensor,
) -> Tensor:
    """Mean of the attention weights over the heads, or with sinks their shares, [queries, keys]: a head at a
    time. Shares are computed in logarithms, since all weights may be small.
    """
    q, k = q[queries], k[keys]
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    hidden, total = ~seen, None
    for head in range(heads):
        products = at_least_float32(q[:, head]) @ at_least_float32(k[:, head // group]).T
        products = products.mul_(scale).masked_fill_(hidden, float("-inf"))
        if sinks is None:
            weights = products.softmax(-1)
            total = weights if total is None else total.add_(weights)
        else:
            whole = torch.logaddexp(products.logsumexp(-1), sinks[head].to(products.dtype))
            logs = products.sub_(whole[:, None])
            total = logs if total is None else torch.logaddexp(total, logs)
    assert total is not None
    return total.div_(heads) if sinks is None else total.softmax(-1)


def _shares_of_compressed(
    q: Tensor, k: Tensor, sinks: Tensor, scale: float, seen: Tensor, among: Tensor
) -> Tensor:
    """The heads' attention weights of compressed keys, the last ones of k, as shares of their sum over heads
    and compressed keys, [queries, keys]: in logarithms, since all may be small.
    """
    total = None
    for heads in _groups(q.shape[1], seen.numel()):
        scores = scaled_products(q[:, heads], k, scale, seen)
        whole = torch.logaddexp(scores.logsumexp(-1), sinks[heads].to(scores.dtype))
        logs = scores[..., -among.shape[1] :].sub_(whole[..., None]).logsumexp(1)
        total = logs if total is None else torch.logaddexp(total, logs)
    assert total is not None
    return total.softmax(-1).masked_fill_(~among, 0.0)


def _groups(heads: int, scores: int) -> list[slice]:
    """Groups of heads that run at once; each head has this number of scores."""
    some = max(1, _SLICE // max(1, scores))
    return [slice(first, min(first + some, heads)) for first in range(0, heads, some)]


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """relu(scale q k) of some heads, [queries, heads, keys]."""
    return torch.relu_((q.flatten(0, 1) @ k.T).mul_(scale)).unflatten(0, q.shape[:2])


def _scores(q: Tensor, k: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The indexer's scores, [queries, keys]."""
    total = None
    for heads in _groups(q.shape[1], len(q) * len(k)):
        scores = torch.bmm(weights[:, None, heads], _products(q[:, heads], k, scale))[:, 0]
        total = scores if total is None else total.add_(scores)
    assert total is not None
    return total


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
    for heads in _groups(q.shape[1], dscores.numel()):
        products = _products(q[:, heads], k, scale)
        dweights[:, heads] = torch.bmm(products, dscores[..., None])[..., 0]
        dproducts = dscores[:, None] * weights[:, heads, None]
        dproducts = dproducts.masked_fill_(products == 0, 0.0).mul_(scale).flatten(0, 1)
        dq[:, heads] = (dproducts @ k).unflatten(0, (len(q), -1))
        dk.addmm_(dproducts.T, q[:, heads].flatten(0, 1))
