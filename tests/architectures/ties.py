"""Keep the inputs of comparisons clear of ties of routers, and of indexers of mean keys, whose scores
are sums of few parts that may all be zero. At a tie, rounding decides: another CPU chooses another expert or
block, and every result changes by percents.

    with clear_of_ties(1e-5):           # TieError if a change of 1e-5 of a token's scores changes its experts
        model(ids)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

router = importlib.import_module("liger_models.layers.experts.router")
ngrams = importlib.import_module("liger_models.layers.recurrent.ngrams")
pooled = importlib.import_module("liger_models.layers.parts.pooled_indexer")


class TieError(AssertionError):
    """A router's or an indexer's choice is within rounding of another one: choose other inputs."""


@contextmanager
def clear_of_ties(margin: float) -> Iterator[None]:
    """Check every choice of experts made in the context: it must not change when each logit of a token
    changes by `margin` times the norm of the token's logits, in the worst direction. So for blocks of keys
    and their scores. Nor may scores of n-grams lie near zero, where the slope of their root has no bound.
    """
    route, decide, gates_of = router.route, router.decide, ngrams.gates_of
    choose = pooled.choose_compressed

    def checked_choose(
        q: Tensor, keys: Tensor, weights: Tensor, places: Any, top_k: int, **scale: Any
    ) -> Any:
        scores = pooled.index_scores(q, keys, weights, **scale)  # [T, W]
        number, (first, end) = torch.arange(len(keys)), places.seen.split(1, dim=1)
        scores = scores.masked_fill((number < first) | (number >= end), -torch.inf)
        if len(keys) > top_k:
            best = scores.topk(top_k + 1).values  # -inf where a token sees fewer
            size = scores.clamp(min=0).norm(dim=-1)
            _refuse((best[:, top_k - 1] - best[:, top_k] <= 2 * margin * size)[:, None])
        return choose(q, keys, weights, places, top_k, **scale)

    def checked_gates(scores: Tensor) -> Tensor:
        _refuse(scores.detach().abs() < 250 * margin)
        return gates_of(scores)

    def checked_route(logits: Tensor, top_k: int, **options: Any) -> Any:
        routing = route(logits, top_k, **options)
        if options.get("experts") is None and len(logits):
            with torch.no_grad():
                experts = routing[1].long()
                change = margin * logits.norm(dim=-1, keepdim=True)
                against = logits + change.expand_as(logits).scatter(-1, experts, -change.expand_as(experts))
                others = route(against, top_k, **options)[1].long()
            _refuse(others.sort(-1).values != experts.sort(-1).values)
        return routing

    def checked_decide(scores: Tensor, jitter: float, draws: Any) -> Any:
        decision = decide(scores, jitter, draws)
        experts, change = decision[0].long(), margin * scores.norm(dim=-1, keepdim=True)
        left = scores
        for i in range(2):  # the formula of layers/experts/sparse_mixer.py
            best = left.max(-1, keepdim=True).values
            size = torch.maximum(scores.abs(), best)
            to_bound = ((best - scores) - 2 * jitter * size).abs()
            _refuse((to_bound <= 2 * (1 + jitter) * change) & (scores != best))
            keys = [left]
            if draws is not None:
                keys.append(left.masked_fill(~decision[2][:, i], -torch.inf) - draws[i][0].log())
            for key in keys:
                first, second = key.topk(2).values.split(1, dim=-1)
                _refuse(first - second <= 2 * change)
            left = left.scatter(-1, experts[:, i : i + 1], -torch.inf)
        return decision

    with (
        mock.patch.object(router, "route", checked_route),
        mock.patch.object(router, "decide", checked_decide),
        mock.patch.object(ngrams, "gates_of", checked_gates),
        mock.patch.object(pooled, "choose_compressed", checked_choose),
    ):
        yield


def _refuse(near: Tensor) -> None:
    if near.any():
        tokens = near.flatten(1).any(-1).nonzero().flatten().tolist()
        raise TieError(
            f"the experts or blocks of tokens {tokens} are near a tie, or a root is near zero: choose other "
            "inputs (another seed)"
        )
