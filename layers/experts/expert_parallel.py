"""Expert parallelism: experts are distributed over ranks, and tokens are sent to them (GShard: Lepikhin et
al., 2020, arXiv:2006.16668; without a capacity, so that no token is dropped).

Rank r of n holds the experts r E / n up to (r + 1) E / n. For each MoE layer:

    x, weights, experts of each token  --all-to-all-->  the ranks that hold some of its experts
    y = sum over its experts there of weight * expert(x)
    y of each rank  --all-to-all-->  the token's rank, where they are summed in float32

A token is sent once to each rank with any of its experts, not once per expert: with 8 experts per token and
two ranks that is a quarter of the rows. The row counts are exchanged first, and the host waits for them once
per layer. If the ranks are no more than a token's experts and have many tokens, all tokens are sent to all
ranks instead, while the products run, and the host waits for nothing (layers/experts/gathered_tokens.py).
DeepEP's kernels may send the tokens in place of torch's collectives (layers/experts/deepep_tokens.py).

    divide_experts(model, mesh["experts"])

Ranks of the experts dimension have different tokens: they are data or sequence ranks. A parameter's gradient
is the sum over the tokens of all ranks, divided by n, just as the mean over ranks for a replicated parameter;
if experts are also sharded (FSDP2) or replicated, the mean is over those ranks, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.kernels import ExpertPath
from liger_models.kernels.experts._expert_operands import divide_gradient
from liger_models.kernels.experts.token_copies import copy_tokens, sum_copies
from liger_models.layers.experts.deepep_tokens import DeepEPRoutes, TokenBuffer
from liger_models.layers.experts.gathered_tokens import GatheredRoutes, TokenCounts, as_experts_cast
from liger_models.layers.sequences.sequence_parallel import all_to_all

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


# What sends tokens to their experts: torch's collectives, or the library DeepEP.
ExpertCommBackend = Literal["standard", "deepep"]
EXPERT_COMM_BACKENDS = get_args(ExpertCommBackend)

# Bytes of a rank's tokens from which they are sent while products run, which takes more launches. An
# estimate: on two H100 a step with 64 MiB took 328 ms with it and 306 ms without; more was not measured.
LEAST_BYTES = 64 << 20


def divide_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None = None,
    comm_backend: ExpertCommBackend = "standard",
) -> list[nn.Module]:
    """Distribute every layer's experts over the ranks of a one-dimensional mesh, in place, as DTensors, which
    `fully_shard` can shard further over other dimensions of the same mesh.

    Args:
        model: on the meta device, or complete and identical in every rank.
        compute_dtype: cast the experts' parameters to this dtype for computation. Default: their own.
        comm_backend: what sends the tokens. "deepep" takes hidden states in bfloat16.

    Returns:
        The experts of each MoE layer.

    Raises:
        ValueError: no MoE layer, one with experts of pictures, a number of experts that the ranks do not
            divide, or experts that are not plain parameters; DeepEP is asked for and cannot be used.
    """
    from torch.distributed.tensor import DTensor, Shard

    # This attribute marks experts that can be distributed: their class depends on this file.
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "exchange")]
    if not layers:
        raise ValueError("no layer of this model has experts: leave experts at 1")
    if any(layer.first_number for _, layer in layers):
        raise ValueError("ranks cannot share experts of text and of images: leave experts at 1")
    if comm_backend not in EXPERT_COMM_BACKENDS:
        raise ValueError(f"expert_comm_backend is {comm_backend!r}; expected one of {EXPERT_COMM_BACKENDS}")
    ranks, rank = mesh.size(), mesh.get_local_rank()
    counts = None
    buffer = TokenBuffer(mesh.get_group()) if comm_backend == "deepep" else None
    for name, layer in layers:
        num_experts = layer.spec.num_experts
        if num_experts % ranks:
            raise ValueError(f"{name} has {num_experts} experts, which {ranks} ranks cannot share evenly")
        parameters = dict(layer.named_parameters(recurse=False))
        if is_parametrized(layer) or any(type(p) is not nn.Parameter for p in parameters.values()):
            raise ValueError(
                f"{name} is parametrized, quantised or already sharded; distribute its experts first"
            )
        for kind, p in parameters.items():
            own = p.detach().chunk(ranks)[rank].clone()
            own = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(layer, kind, nn.Parameter(own, p.requires_grad))
        group = mesh.get_group()
        counts = counts or TokenCounts(group)
        layer.exchange = ExpertExchange(group, num_experts // ranks, compute_dtype, counts, buffer)
    return [layer for _, layer in layers]


class ExpertExchange:
    """Exchange of tokens between the ranks of a group.

    Args:
        own: number of experts per rank.
        compute_dtype: of their parameters in computation; None: their own.
        counts: of the ranks' tokens, shared by all layers.
        buffer: DeepEP's, shared by all layers, if it sends the tokens.
    """

    def __init__(
        self,
        group: Any,
        own: int,
        compute_dtype: torch.dtype | None,
        counts: TokenCounts,
        buffer: TokenBuffer | None = None,
    ):
        self.group, self.own, self.compute_dtype = group, own, compute_dtype
        self.counts, self.buffer = counts, buffer
        self.ranks, self.rank = group.size(), group.rank()
        self._locals: Tensor | None = None  # of each expert

    def plan(
        self, x: Tensor, experts: Tensor, batch: object | None = None
    ) -> Routes | GatheredRoutes | DeepEPRoutes:
        """Routes of all ranks' tokens, given this rank's x [T, H] and experts [T, k]. Unless all tokens go to
        all ranks this synchronises the device. Ranks tell their numbers of tokens once per `batch`.
        """
        if self.buffer is not None:
            return DeepEPRoutes(self, self.buffer)
        if self.ranks <= experts.shape[1]:
            counts = self.counts.of(len(experts), experts.device, batch)
            if max(counts) * x.shape[1] * x.itemsize >= LEAST_BYTES:
                return GatheredRoutes(self, counts)
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

    def parameter(self, p: Any, divides: bool = True) -> Any:
        """This rank's part of an experts' parameter (other tensors are unchanged). Its gradient is divided by
        the number of ranks, unless the products do that.
        """
        if p is None or not is_sharded(p):
            return p
        own = p.to_local()
        own = own if self.compute_dtype is None else own.to(self.compute_dtype)
        return divide_gradient(own, self.ranks) if divides else own

    def local(self, experts: Tensor) -> Tensor:
        """Numbers of experts [T, k] among this rank's, from 0, and -1 for experts elsewhere; int32. A table
        takes one kernel instead of five.
        """
        if self._locals is None or self._locals.device != experts.device:
            of_all = torch.arange(self.ranks * self.own, dtype=torch.int32, device=experts.device)
            of_all -= self.rank * self.own
            self._locals = torch.where((of_all >= 0) & (of_all < self.own), of_all, -1)
        return self._locals.index_select(0, experts.flatten()).view(experts.shape)

    def path(self, path: ExpertPath, num_experts: int) -> ExpertPath:
        """The part of a low-rank path, whole in every rank, that belongs to this rank's experts. Its gradient
        is zero elsewhere, so the mean over the ranks is the parameter's gradient.
        """
        own = slice(self.rank * self.own, (self.rank + 1) * self.own)
        a, b = path.a.unflatten(0, (num_experts, -1)), path.b.unflatten(1, (-1, num_experts))
        return ExpertPath(a[own].flatten(0, 1), b[..., own].flatten(1), path.scale)

    def kept_bytes(self, hidden_size: int, top_k: int, itemsize: int) -> int:
        """Saved bytes per token: the rows that the experts read, with weights and experts, on as many ranks
        as can hold some of its experts; identical parts count once.
        """
        return min(self.ranks, top_k) * (itemsize * hidden_size + 12 * top_k) + 4 * self.ranks


class Routes:
    """Routes of one layer's tokens to their experts and back.

    Attributes:
        position: [T, n] int32, index of a token's row among the sent rows, by rank, or -1.
        sent, received: numbers of rows sent to, and received from, each rank.
        num_slots: number of local experts over all received rows.
    """

    rows = None  # exchanged before and after the products
    meanwhile: Any = None  # not called

    def __init__(
        self, exchange: ExpertExchange, position: Tensor, sent: list[int], received: list[int], slots: int
    ):
        self.exchange, self.position, self.num_slots = exchange, position, slots
        self.sent, self.received = sent, received

    def there(
        self, x: Tensor, weights: Tensor, experts: Tensor, counted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send x [T, H], weights and experts [T, k] of this rank's tokens; returns them for the tokens with
        experts here, with local expert indices from 0, and -1 for experts elsewhere.
        """
        exchange = self.exchange
        x = as_experts_cast(x)
        choice = torch.cat([weights, experts.to(weights.dtype)], dim=1)  # one message; numbers below 2^24
        x, choice = (self._sent(rows) for rows in (x, choice))
        weights, numbers = choice.chunk(2, dim=1)
        own = numbers.detach().to(torch.int32) - exchange.rank * exchange.own
        return x, weights.contiguous(), torch.where((own >= 0) & (own < exchange.own), own, -1)

    def back(self, y: Tensor) -> Tensor:
        """Return the experts' output rows to their ranks and sum them -> y [T, H] of this rank's tokens."""
        rows = all_to_all(y, self.received, self.sent, self.exchange.group)
        return sum_copies(rows, self.position)

    def _sent(self, x: Tensor) -> Tensor:
        rows = copy_tokens(x, self.position, sum(self.sent))
        return all_to_all(rows, self.sent, self.received, self.exchange.group)
