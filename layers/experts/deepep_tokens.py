"""Expert parallelism through DeepEP (github.com/deepseek-ai/DeepEP), whose kernels send tokens over NVLink
within a node and over RDMA between nodes: an alternative to torch's collectives, chosen with
`expert_comm_backend="deepep"`.

    x, weights, experts of each token  --dispatch-->  the ranks that hold some of its experts, once to each
    y of each rank                     --combine-->   the token's rank, where DeepEP sums them in float32

In the backward pass each is the other's gradient. The host waits once per layer, for the number of rows that
arrive; a recomputed layer sends its rows by the layout of the first time, without waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.experts.gathered_tokens import as_experts_cast


class TokenBuffer:
    """DeepEP's communication buffer of a group, shared by all layers. It grows with the width of rows.

    Raises:
        ValueError: deep_ep is not installed, lacks `Buffer`, or has no settings for this number of ranks.
    """

    def __init__(self, group: Any):
        self._group, self._buffer, self._bytes = group, None, (0, 0)
        try:
            from deep_ep import Buffer
        except ImportError as error:
            raise ValueError(
                f"expert_comm_backend 'deepep' requires deep_ep ({error}): install it from "
                "github.com/deepseek-ai/DeepEP, or use 'standard'"
            ) from error
        self._class: Any = Buffer
        ranks = group.size()
        try:
            self._configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        except AssertionError as error:
            raise ValueError(f"DeepEP has no settings for {ranks} ranks ({error}); use 'standard'") from error

    def of(self, x: Tensor) -> Any:
        """The buffer for rows of x [T, H], which all ranks ask for at the same time.

        Raises:
            ValueError: the rows are not in bfloat16.
        """
        if x.dtype != torch.bfloat16:
            raise ValueError(
                f"DeepEP sends hidden states in bfloat16, found {x.dtype}: train in bfloat16 or under its "
                "autocast, or use expert_comm_backend 'standard'"
            )
        row, ranks = x.shape[1] * x.itemsize, self._group.size()
        nvlink = max(config.get_nvl_buffer_size_hint(row, ranks) for config in self._configs)
        rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in self._configs)
        if self._buffer is None or nvlink > self._bytes[0] or rdma > self._bytes[1]:
            self._buffer, self._bytes = self._class(self._group, nvlink, rdma), (nvlink, rdma)
        return self._buffer


class DeepEPRoutes:
    """Routes of one layer's tokens to their experts and back.

    Attributes:
        exchange: the experts' `ExpertExchange`.
        num_slots: number of local experts over all received rows, after `there`.
    """

    rows = None  # exchanged before and after the products
    meanwhile: Any = None  # not called

    def __init__(self, exchange: Any, buffer: TokenBuffer):
        self.exchange, self.buffer = exchange, buffer
        self.num_slots = 0
        self.handle: Any = None  # DeepEP's layout of these tokens
        self._choice: tuple[Tensor, Tensor] | None = None  # received weights and experts

    def there(
        self, x: Tensor, weights: Tensor, experts: Tensor, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send x [T, H], weights and experts [T, k] of this rank's tokens; returns them for the tokens with
        experts here, with local expert indices from 0, and -1 for experts elsewhere.
        """
        x, own_weights, own = _Dispatch.apply(as_experts_cast(x), weights.float(), experts, self)
        return x, own_weights.to(weights.dtype), own

    def back(self, y: Tensor) -> Tensor:
        """Return the experts' output rows to their ranks and sum them -> y [T, H] of this rank's tokens."""
        return _Combine.apply(y, self)

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffer = self.buffer.of(x)
        if self._choice is None:
            experts, num_experts = experts.long(), self.exchange.own * self.exchange.ranks
            for_rank, for_node, for_expert, needed, _ = buffer.get_dispatch_layout(experts, num_experts)
            x, own, weights, counts, self.handle, _ = buffer.dispatch(
                x.contiguous(),
                topk_idx=experts,
                topk_weights=weights.contiguous(),
                num_tokens_per_rank=for_rank,
                num_tokens_per_rdma_rank=for_node,
                is_token_in_rank=needed,
                num_tokens_per_expert=for_expert,
            )
            self.num_slots, self._choice = sum(counts), (weights, own.to(torch.int32))
            return x, *self._choice
        return self.send(x), *self._choice

    def send(self, x: Tensor) -> Tensor:
        """Rows of x [T, H] to the ranks that got them before."""
        return self.buffer.of(x).dispatch(x.contiguous(), handle=self.handle)[0]

    def sum(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Sums of the ranks' rows, and of their weights [R, k], for this rank's tokens."""
        buffer = self.buffer.of(rows)
        return buffer.combine(rows.contiguous(), self.handle, topk_weights=weights)[:2]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, routes: DeepEPRoutes
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.routes = routes
        x, weights, own = routes.dispatch(x, weights, experts)
        weights, own = weights.view_as(weights), own.view_as(own)  # a recomputation returns them again
        ctx.mark_non_differentiable(own)
        return x, weights, own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dweights: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None, None]:
        return *ctx.routes.sum(dx, dweights.contiguous()), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, routes: DeepEPRoutes) -> Tensor:
        ctx.routes = routes
        return routes.sum(y)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.send(dy), None
