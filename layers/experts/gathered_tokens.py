"""Expert parallelism of large batches, for ranks that are no more than a token's experts: every rank gets all
tokens.

With n ranks and k >= n experts per token, nearly every token has some expert on every rank. Then sending all
tokens to all ranks costs hardly more bytes than sending each to the ranks that need it, and nobody needs to
know how many rows go where:

    weights, experts of each token, then x   --to all ranks-->   rows of all tokens, this rank's first
    y of each rank, by token                 --to its rank-->    summed in float32

The rows of x travel while the experts' first product runs over this rank's own tokens, and results of other
ranks' tokens travel while its second product does; in the backward pass likewise their gradients
(kernels/experts/_expert_passes.py), and those of the weights earlier. Results that arrive are added as this
rank's own are summed, and its rows of x are copied while the weights travel, so that hardly any pass over
memory is for the exchange alone. The host learns the ranks' numbers of tokens, once per batch
(`TokenCounts`). The number of rows of this rank's experts stays on the device, which computes them in windows
of a fixed size (kernels/experts/moe_experts.py). Only products in float8, or with weights kept in quantised
bits, wait until the host knows it, while x travels and the shared expert runs. Nothing is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.sequences.host_copy import HostCopy


class TokenCounts:
    """The numbers of tokens of a group's ranks, exchanged once per batch, between hosts: a collective of the
    GPUs would wait for those before it, so for the end of the last step.
    """

    def __init__(self, group: Any):
        self._group = group
        self._batch: weakref.ref[Any] | None = None
        self._counts: list[int] = []
        self._hosts: Any = None  # their process group

    def of(self, tokens: int, device: torch.device, batch: object | None) -> list[int]:
        """Numbers of tokens of all ranks, given this rank's.

        Args:
            batch: the batch in which these numbers hold: the same one in all layers, or not, on all ranks.
                None: exchange them anew.
        """
        if batch is None or self._batch is None or self._batch() is not batch:
            self._counts = self._exchange(tokens, device)
            self._batch = None if batch is None else weakref.ref(batch)
        return self._counts

    def _exchange(self, tokens: int, device: torch.device) -> list[int]:
        distributed: Any = torch.distributed
        if self._hosts is None:
            self._hosts = self._group
            if device.type == "cuda":
                ranks = distributed.get_process_group_ranks(self._group)
                self._hosts = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        own = torch.tensor([tokens])
        counts = [torch.empty_like(own) for _ in range(self._group.size())]
        distributed.all_gather(counts, own, group=self._hosts)
        return torch.cat(counts).tolist()


def as_experts_cast(x: Tensor) -> Tensor:
    """Hidden states in the dtype to which the experts would cast them under autocast, so that it is sent."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class TokenExchange:
    """Rows of all tokens, this rank's first, and the sums of results on their way back.

    Args:
        counts: the ranks' numbers of tokens.
        choice: the exchange of these tokens' weights and experts.
    """

    # See `Exchange` in kernels/experts/_expert_passes.py.
    overlaps = False
    divisor = 1

    def __init__(self, group: Any, counts: Sequence[int], choice: TokenExchange | None = None):
        self._choice = choice
        self.group, self.own, self.ranks = group, counts[group.rank()], len(counts)
        self.total, first = sum(counts), self.own
        self._others: list[tuple[int, slice]] = []  # ranks with tokens, and their rows
        for rank, count in enumerate(counts):
            if rank != group.rank() and count:
                self._others.append((rank, slice(first, first + count)))
                first += count
        self._senders = [rank for rank in range(len(counts)) if rank != group.rank() and self.own]
        self._arriving: list[Any] = []
        self._own: tuple[Tensor, Tensor] | None = None  # this rank's rows, and rows that lack them
        self._leaving: tuple[Tensor, Tensor, list[Any]] | None = None
        self._summed: int | None = None  # address of rows whose first ones are sums over ranks
        self.count: HostCopy | None = None  # of slots with an expert of this rank

    def num_rows(self) -> int:
        """Number of slots with an expert of this rank. Waits until the host knows it."""
        assert self.count is not None
        return int(self.count.tolist())

    def gather(self, x: Tensor) -> Tensor:
        """x [t, ...] of this rank's tokens -> those of all tokens [T, ...], which can be read after
        `arrive`, and this rank's after `fill`.
        """
        rows, x = x.new_empty(self.total, *x.shape[1:]), x.contiguous()
        send = [(rank, x) for rank in self._senders]
        self._arriving = self._start(rows, send, [(rank, rows[of_rank]) for rank, of_rank in self._others])
        self._own = x, rows
        return rows

    def own_rows(self) -> Tensor:
        """This rank's rows, once, instead of `fill`."""
        assert self._own is not None
        (own, _), self._own = self._own, None
        return own

    def fill(self) -> None:
        """Copy this rank's rows to their place among those of all tokens, unless they were taken."""
        if self._own is not None:
            (own, rows), self._own = self._own, None
            rows[: self.own] = own

    def divides(self, x: Tensor, *matrices: Any) -> bool:
        """Make the products divide the matrices' gradients by the number of ranks, if that is as exact as
        dividing these: by a power of two, in a dtype with float32's exponents.
        """
        exact = self.ranks & (self.ranks - 1) == 0 and x.dtype != torch.float16
        if exact and all(map(is_sharded, matrices)):
            self.divisor = self.ranks
        return self.divisor > 1

    def arrive(self) -> None:
        """Wait until the rows of all tokens are there; on a GPU, its stream waits."""
        self.fill()
        for work in self._arriving:
            work.wait()
        self._arriving = []

    def leave(self, rows: Tensor) -> None:
        """Start to return the other ranks' tokens' rows of a result [T, ...]."""
        returned = rows.new_empty(len(self._senders), self.own, *rows.shape[1:])
        receive = list(zip(self._senders, returned, strict=True))
        works = self._start(rows, [(rank, rows[of_rank]) for rank, of_rank in self._others], receive)
        self._leaving, self._summed = (rows, returned, works), None

    def parts(self) -> Tensor:
        """The other ranks' results [n - 1, t, H] for this rank's tokens, after `leave`. They are added to its
        own before `returned`.
        """
        assert self._leaving is not None
        self._summed = self._leaving[0].data_ptr()
        return self._wait_for_return()

    def leave_weights(self, dweights: Tensor) -> None:
        """Start to return the gradient of the other ranks' tokens' weights [T, k]."""
        if self._choice is not None:
            self._choice.leave(dweights)

    def returned(self, rows: Tensor) -> Tensor:
        """Results [T, ...] of this rank -> the sums over ranks for its own tokens [t, ...].

        Raises:
            RuntimeError: a hook has replaced results that were sent before.
        """
        sent = self._summed if self._leaving is None else self._leaving[0].data_ptr()
        if sent not in (None, rows.data_ptr()):
            raise RuntimeError(
                "a hook has replaced results of experts while they were exchanged between ranks; use hooks "
                "on the experts' module instead, whose input and output are those of this rank's tokens"
            )
        if self._summed is not None:
            self._summed = None
            return rows[: self.own].detach()  # a view would be one of the layer's output
        if self._leaving is None:
            self.leave(rows)
        parts, own = self._wait_for_return(), rows[: self.own]
        if len(parts) <= 1:  # the sum of two numbers is rounded once in any case
            return own + parts[0] if len(parts) else own.clone()
        wide = torch.promote_types(rows.dtype, torch.float32)
        return torch.sum(parts, 0, dtype=wide).add_(own).to(rows.dtype)

    def _wait_for_return(self) -> Tensor:
        assert self._leaving is not None
        _, returned, works = self._leaving
        for work in works:
            work.wait()
        self._leaving = None
        return returned

    def _start(
        self, like: Tensor, send: list[tuple[int, Tensor]], receive: list[tuple[int, Tensor]]
    ) -> list[Any]:
        """Start to send rows to ranks and to receive rows from ranks."""
        distributed: Any = torch.distributed
        if like.is_cuda:  # one call, which takes less of the host's time
            nothing = like.new_empty(0)
            parts = [[nothing] * self.ranks, [nothing] * self.ranks]
            for of_all, pairs in zip(parts, (receive, send), strict=True):
                for rank, rows in pairs:
                    of_all[rank] = rows
            return [distributed.all_to_all(*parts, group=self.group, async_op=True)]
        ops = [
            distributed.P2POp(op, rows, group=self.group, group_peer=rank)
            for op, pairs in ((distributed.isend, send), (distributed.irecv, receive))
            for rank, rows in pairs
        ]
        return distributed.batch_isend_irecv(ops) if ops else []


class GatheredRoutes:
    """Routes of one layer's tokens to the experts of all ranks and back.

    Attributes:
        exchange: the experts' `ExpertExchange`.
        meanwhile: called while x travels, or None.
    """

    num_slots = None  # known to `rows`
    meanwhile: Callable[[], object] | None = None

    def __init__(self, exchange: Any, counts: Sequence[int]):
        self.exchange, self.counts = exchange, counts
        self.rows = TokenExchange(exchange.group, counts)
        self._count: HostCopy | None = None

    def there(
        self, x: Tensor, weights: Tensor, experts: Tensor, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, H], weights and experts [t, k] of this rank's tokens -> those of all tokens, with local
        expert indices from 0, and -1 for experts elsewhere. The rows of x are arriving, and their number is
        on its way to the host if they are `counted`.
        """
        group, exchange = self.exchange.group, self.exchange
        choice = TokenExchange(group, self.counts)
        self.rows = TokenExchange(group, self.counts, choice)  # of this run: another may be under way
        x, weights, experts = _Gather.apply(as_experts_cast(x), weights, experts, choice, self.rows)
        own = exchange.local(experts)
        if counted and self._count is None:
            self._count = HostCopy((own >= 0).sum())
        self.rows.count = self._count
        if self.meanwhile is not None:
            self.meanwhile()
        return x, weights, own

    def back(self, y: Tensor) -> Tensor:
        """Results y [T, H] of this rank's experts -> their sums for this rank's tokens [t, H]."""
        return _Return.apply(y, self.rows)


class _Gather(torch.autograd.Function):
    """Rows x, weights and experts of all tokens; rows of other ranks are still arriving when it returns.

    Weights and experts [t, k] travel first, in one message. While they do, this rank's rows are copied.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, choice: TokenExchange, exchange: TokenExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, ctx.choice = exchange, choice
        ctx.set_materialize_grads(False)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.itemsize]
        chosen = torch.cat([weights.view(integers), experts.to(integers)], 1)
        chosen = choice.gather(chosen.view(torch.uint8))  # NCCL sends no 16-bit integers
        rows = exchange.gather(x)
        exchange.fill()
        choice.arrive()
        of_weights, of_experts = (half.contiguous() for half in chosen.view(integers).chunk(2, 1))
        all_weights, all_experts = of_weights.view(weights.dtype), of_experts.to(experts.dtype)
        constant = [t for t, needed in ((rows, 0), (all_weights, 1)) if not ctx.needs_input_grad[needed]]
        ctx.mark_non_differentiable(*constant, all_experts)
        return rows, all_weights, all_experts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_rows: Tensor | None, of_weights: Tensor | None, _: Any
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx = None if of_rows is None else ctx.exchange.returned(of_rows.contiguous())
        dweights = None if of_weights is None else ctx.choice.returned(of_weights.contiguous())
        return dx, dweights, None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.returned(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows = ctx.exchange.gather(gradient)
        if not ctx.exchange.overlaps:
            ctx.exchange.arrive()
        return rows, None
