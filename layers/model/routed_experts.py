"""Experts that a call takes from elsewhere, or returns: router replay.

    sampled = engine.generate(...)                                   # with the experts of each token
    scores = model.score(ids, labels, routed_experts=sampled.experts)
    old = model.score(ids, labels, output_routed_experts=True)       # or those of an earlier pass
    new = model.score(ids, labels, routed_experts=old.routed_experts)

A policy gradient compares two probabilities of the same token. If rounding makes the inference engine and the
trainer choose different experts, these probabilities come from different functions (Ma et al., 2025,
"Stabilizing MoE reinforcement learning by aligning training and inference routers", arXiv:2510.11370). Only
the choice is replayed: the experts' weights are computed from this call's logits, so gradients reach the
router. Layers that run again in the backward
pass use the same experts. Modules for multi-token prediction choose their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers.experts.modal_experts import ModalExperts
from liger_models.layers.experts.router import Router, SparseMixerRouter
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.sequences.sequences import Sequences


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Experts that a call specifies, and whether it returns the experts used.

    Attributes:
        given: [batch, seq, layers, top_k] integers, of all decoder layers (those without experts are ignored)
            or of only the layers with experts. A token for which a layer has -1 routes itself there: the last
            token of a sample, which no engine has read, and padding.
        wanted: return the experts used, in the same form for all decoder layers, int32; -1 at padding and in
            layers without experts.
    """

    given: Tensor | None = None
    wanted: bool = False

    @classmethod
    def take(cls, keywords: dict[str, Any]) -> Self:
        """Remove `routed_experts` and `output_routed_experts` from the keywords of a call."""
        given, wanted = keywords.pop("routed_experts", None), keywords.pop("output_routed_experts", None)
        return cls(given, bool(wanted))

    def begin(self, layers: Iterable[nn.Module], sequences: Sequences) -> Refusal | None:
        """Give the routers their experts. Returns a check of their values, which the device has begun; until
        it is read, a router chooses for itself where they are wrong.

        Raises:
            DataError: no layer has experts, layers choose different numbers of them or at random, or the
                experts do not fit the batch and the layers.
        """
        if self.given is None and not self.wanted:
            return None
        routers = _routers(layers)
        if self.wanted:
            sequences.notes.routing.seen = {}
        if self.given is None:
            return None
        found, own = [router for router in routers if router is not None], self.given
        (batch, seq), k = sequences.documents.shape, found[0].spec.experts_per_token
        if any(isinstance(router, SparseMixerRouter) for router in found):
            raise DataError("routed_experts: this model's routers draw experts at random; leave it out")
        fits = own.dim() == 4 and own.shape[2] in (len(found), len(routers))
        if not fits or own.is_floating_point() or (*own.shape[:2], own.shape[3]) != (batch, seq, k):
            raise DataError(
                f"routed_experts is {own.dtype} {list(own.shape)}; expected integers [{batch}, {seq}, "
                f"{len(routers)}, {k}], or [{batch}, {seq}, {len(found)}, {k}] for the layers with experts"
            )
        rows = sequences.pack(own.to(sequences.device))  # [T, layers, k]
        if rows.shape[1] != len(found):
            places = torch.tensor([place for place, router in enumerate(routers) if router is not None])
            rows = rows.index_select(1, to_device(places, rows.device))
        chosen = (rows >= 0).all(-1, keepdim=True)  # [T, layers, 1]
        ordered = rows.sort(-1).values
        repeated = ((ordered[..., 1:] == ordered[..., :-1]) & chosen).any()
        sizes = torch.tensor([router.spec.num_choices for router in found])
        sizes = to_device(sizes, rows.device)
        outside = ((rows >= sizes[:, None]) | (rows < -1)).any(-1, keepdim=True)
        rows = torch.where(chosen & ~outside, rows, -1).int()
        given = zip(found, rows.unbind(1), strict=True)
        sequences.notes.routing.given = {router: experts.contiguous() for router, experts in given}
        return Refusal(repeated | outside.any(), min(router.spec.num_choices for router in found))

    def used(self, layers: Iterable[nn.Module], sequences: Sequences) -> Tensor:
        """The experts that the routers used, [batch, seq, layers, top_k] int32."""
        seen, routers = sequences.notes.routing.seen, _routers(layers)
        assert seen is not None
        width = next(router.spec.experts_per_token for router in routers if router is not None)
        tokens = len(next(iter(seen.values())))
        none = torch.full((tokens, width), -1, dtype=torch.int32, device=sequences.device)
        experts = [none if router is None else seen[router].to(none.device) for router in routers]
        return sequences.unpack(torch.stack(experts, 1) + 1) - 1  # padding is unpacked to zero


class Refusal:
    """The check of given experts.

    Attributes:
        wrong: whether they are refused, a bool on the device.
    """

    def __init__(self, wrong: Tensor, num_choices: int):
        self.wrong, self._num_choices, self._copy = wrong, num_choices, HostCopy(wrong[None])

    def finish(self) -> None:
        """Raise DataError if the experts are refused."""
        if any(self._copy.tolist()):
            raise DataError(
                f"routed_experts must be from 0 to {self._num_choices - 1}, "
                "different for one token in one layer, or -1 where the layer should choose"
            )


def _routers(layers: Iterable[nn.Module]) -> list[Router | None]:
    """The router of each layer, or None."""
    layers = list(layers)
    if any(isinstance(module, ModalExperts) for layer in layers for module in layer.modules()):
        raise DataError("routed_experts: image tokens have separate experts in this model; leave it out")
    found = [next((m for m in layer.modules() if isinstance(m, Router)), None) for layer in layers]
    widths = {router.spec.experts_per_token for router in found if router is not None}
    if len(widths) != 1:
        raise DataError(
            "routed_experts: "
            + (
                "no layer of this model has experts"
                if not widths
                else f"layers choose {sorted(widths)} experts"
            )
        )
    return found
