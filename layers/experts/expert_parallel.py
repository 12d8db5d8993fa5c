"""Experts that are divided over ranks, to which tokens are sent (GShard: Lepikhin et al., 2020,
arXiv:2006.16668; without a capacity, so that no token is dropped).

Rank r of n holds the experts r E / n up to (r + 1) E / n. Of a layer of experts

    x, weights, experts of each token  --all-to-all-->  the ranks that hold some of its experts
    y = sum over its experts there of weight * expert(x)
    y of each rank  --all-to-all-->  the token's rank, where they are added up in float32

A token is sent once to each rank that holds any of its experts, and not once to each expert: with 8 experts a
token and two ranks that is a quarter of the rows. How many rows go where is told in a message of its own,
which the host waits for, once a layer: rows for the worst case, which would spare that, take n times the
memory and the time of the messages.

    divide_experts(model, mesh["experts"])

Ranks have tokens of their own: those of an experts' dimension are ranks of data, or of a sequence. A
parameter's gradient is the sum of what the tokens of all ranks give, over n, as the mean over ranks is of a
parameter that all hold: where experts are divided further (FSDP2), or repeated, the mean is over those ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from liger_models.kernels._dispatch import once_differentiable
from liger_models.kernels.experts.token_copies import copy_tokens, sum_copies
from liger_models.layers.sequences.sequence_parallel import all_to_all

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def divide_experts(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None
) -> list[nn.Module]:
    """Let each rank of a mesh of one dimension hold a part of every layer's experts, in place: as DTensors,
    which `fully_shard` over other dimensions of the same mesh divides further.

    Args:
        model: on the meta device, or whole and the same in every rank.
        compute_dtype: what the experts' parameters are cast to when they are at work. Default: their own.

    Returns:
        The experts of each layer that has some.

    Raises:
        ValueError: no layer has experts; they cannot be dealt out evenly; or they are no plain parameters.
    """
    from torch.distributed.tensor import DTensor, Shard

    # Experts say by this attribute that they can be divided: their class stands on this file.
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "exchange")]
    if not layers:
        raise ValueError("no layer of this model has experts: leave experts at 1")
    ranks, rank = mesh.size(), mesh.get_local_rank()
    for name, layer in layers:
        num_experts = layer.spec.num_experts
        if num_experts % ranks:
            raise ValueError(f"{name} has {num_experts} experts, which {ranks} ranks cannot share evenly")
        parameters = dict(layer.named_parameters(recurse=False))
        if is_parametrized(layer) or any(type(p) is not nn.Parameter for p in parameters.values()):
            raise ValueError(
                f"{name} is wrapped by an adapter, quantised or divided already; divide its experts first"
            )
        for kind, p in parameters.items():
            own = p.detach().chunk(ranks)[rank].clone()
            own = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(layer, kind, nn.Parameter(own, p.requires_grad))
        layer.exchange = ExpertExchange(mesh.get_group(), num_experts // ranks, compute_dtype)
    return [layer for _, layer in layers]


class ExpertExchange:
    """How the ranks of a group send tokens to their experts.

    Args:
        own: the number of experts that each rank holds.
        compute_dtype: of their parameters at work; None: their own.
    """

    def __init__(self, group: Any, own: int, compute_dtype: torch.dtype | None = None):
        self.group, self.own, self.compute_dtype = group, own, compute_dtype
        self.ranks, self.rank = group.size(), group.rank()

    def plan(self, experts: Tensor) -> Routes:
        """Where the tokens of all ranks go, by the experts [T, k] of those here. It waits for the device."""
        owner = (experts // self.own).long()
        needed = owner.new_zeros(len(owner), self.ranks, dtype=torch.bool).scatter_(1, owner, True)
        slots = owner.new_zeros(self.ranks).scatter_add_(0, owner.flatten(), torch.ones_like(owner.flatten()))
        there = torch.stack([needed.sum(0), slots], dim=1)  # rows for each rank, and slots in them
        here = torch.empty_like(there)
        torch.distributed.all_to_all_single(here, there, group=self.group)
        row = (needed.T.flatten().cumsum(0) - 1).view(self.ranks, -1).T
        position = torch.where(needed, row, -1).to(torch.int32).contiguous()
        (sent, _), (received, slots_here) = torch.stack([there.T, here.T]).tolist()
        return Routes(self, position, sent, received, sum(slots_here))

    def parameter(self, p: Any) -> Any:
        """What this rank holds of the experts' parameter, if they have it, for a gradient that is divided by
        the ranks.
        """
        if p is None:
            return None
        own = p.to_local()
        return _DividedGradient.apply(
            own if self.compute_dtype is None else own.to(self.compute_dtype), self.ranks
        )

    def kept_bytes(self, hidden_size: int, top_k: int, itemsize: int) -> int:
        """Of a token: the rows that the experts read, with weights and experts, on as many ranks as can hold
        some of its own; what of them is alike is one.
        """
        return min(self.ranks, top_k) * (itemsize * hidden_size + 12 * top_k) + 4 * self.ranks


class Routes:
    """The ways of one layer's tokens to their experts and back.

    Attributes:
        position: [T, n] int32, the row of a token among those that are sent, by rank, or -1.
        sent, received: the rows that go to, and come from, each rank.
        num_slots: how many experts the rows that come here have here.
    """

    def __init__(
        self, exchange: ExpertExchange, position: Tensor, sent: list[int], received: list[int], slots: int
    ):
        self.exchange, self.position, self.num_slots = exchange, position, slots
        self.sent, self.received = sent, received

    def there(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], weights and experts [T, k] of this rank's tokens -> those of the tokens that have experts
        here, which count from 0; of others -1.
        """
        exchange = self.exchange
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as the experts would
        choice = torch.cat([weights, experts.to(weights.dtype)], dim=1)  # one message; numbers below 2^24
        x, choice = (self._sent(rows) for rows in (x, choice))
        weights, numbers = choice.chunk(2, dim=1)
        own = numbers.detach().to(torch.int32) - exchange.rank * exchange.own
        return x, weights.contiguous(), torch.where((own >= 0) & (own < exchange.own), own, -1)

    def back(self, y: Tensor) -> Tensor:
        """What came of the rows here -> y [T, H] of this rank's tokens."""
        rows = all_to_all(y, self.received, self.sent, self.exchange.group)
        return sum_copies(rows, self.position)

    def _sent(self, x: Tensor) -> Tensor:
        rows = copy_tokens(x, self.position, sum(self.sent))
        return all_to_all(rows, self.sent, self.received, self.exchange.group)


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
