"""Sequences that are divided over ranks, which exchange heads around attention (Ulysses: Jacobs et al., 2023,
arXiv:2309.14509).

Of the T tokens of a batch, rank r of n holds a slice, t of them; what is done token by token needs no other.
For attention each rank gets all tokens of its share of the heads, and gives back what came of them:

    q, k, v [t, heads, dim]  --all-to-all-->  [T, heads / n, dim]
    attend  [T, heads / n, dim]  --all-to-all-->  [t, heads, dim]

So documents may lie across slices, and windows, caps, sinks and chunks are those of one process. Positions
are those of the whole. Where ranks share a head of keys, each gets it, and its gradients are added. A rank
sends t (q + k + v + out) / n elements to each other in the forward pass, as many in the backward pass, and
the former again where a layer runs again (the level `checkpoint`): the others keep what came.

    divide_sequences(model, mesh["sequence"])
    model(batch, labels=labels).loss.backward()          the same batch on every rank of that dimension

The model cuts the batch at its door, into slices that differ by one token at most, without padding. The loss
is that of the whole batch, on every rank, and the gradient of a parameter is the mean of what the ranks have,
as DDP and FSDP2 make it of ranks with batches of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.specs import AttentionSpec, LatentAttentionSpec, SharedAttentionSpec

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def divide_sequences(model: Any, mesh: DeviceMesh) -> Any:
    """Let every rank of a mesh of one dimension compute a slice of each batch of a `CausalLM`, in place.

    From here on all of them call the model with the same batch, in the same order. Generation is not divided:
    each rank makes all of it.

    Raises:
        TypeError: it is no `CausalLM`, but a model of another library, or in one.
        ValueError: a layer whose heads cannot be dealt out evenly, or that has no heads to exchange; a model
            that draws random numbers in training, which slices would draw alike.
    """
    ranks = mesh.size()
    if not hasattr(model, "sequence_group"):
        raise TypeError(
            f"a {type(model).__name__} does not divide its sequences; liger_models.from_hub makes a model "
            "that does"
        )
    if model.spec.vision is not None:
        raise ValueError(
            "this model sees images, whose features stand in one place of a batch: its sequences are not "
            "divided; divide its parameters, or load its language model alone (text_only=True)"
        )
    for i, layer in enumerate(model.layers):
        mixer = layer.spec.mixer
        if not isinstance(mixer, AttentionSpec | SharedAttentionSpec | LatentAttentionSpec):
            raise ValueError(
                f"layer {i} mixes tokens by {type(mixer).__name__}, which has no heads that {ranks} ranks "
                "could exchange: sequences cannot be divided"
            )
        if mixer.num_attention_heads % ranks:
            raise ValueError(
                f"layer {i} has {mixer.num_attention_heads} query heads, which {ranks} ranks cannot share "
                "evenly; divide sequences over a number of ranks that divides the heads of every layer"
            )
    if model.spec.draws_in_training:
        raise ValueError(
            "the routers of this model draw experts at random in training, and ranks that hold slices of one "
            "batch would draw alike: sequences cannot be divided"
        )
    model.sequence_group = mesh.get_group() if ranks > 1 else None
    return model


class Slice:
    """The tokens that this rank holds of a batch of `total`.

    Attributes:
        sizes: how many each rank holds, one after the other.
        share: this rank's, of all.

    Raises:
        DataError: fewer tokens than ranks.
    """

    def __init__(self, group: Any, total: int):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        if total < self.ranks:
            raise DataError(f"a batch of {total} tokens cannot be divided over {self.ranks} ranks")
        least, more = divmod(total, self.ranks)
        self.total = total
        self.sizes = [least + (rank < more) for rank in range(self.ranks)]
        self.share = self.sizes[self.rank] / total
        self._first = sum(self.sizes[: self.rank])

    def of(self, tokens: Tensor) -> Tensor:
        """[T, ...] -> this rank's, [t, ...]."""
        return tokens.narrow(0, self._first, self.sizes[self.rank])

    def gathered(self, tokens: Tensor) -> Tensor:
        """[t, ...] of each rank -> [T, ...] on all of them."""
        copies = tokens.expand(self.ranks, *tokens.shape).flatten(0, 1)
        return all_to_all(copies, self._mine(), self.sizes, self.group)

    def summed(self, value: Tensor) -> Tensor:
        """The sum over the ranks, on all of them."""
        return _Sum.apply(value, self.group)

    def counted(self, counts: Tensor) -> Tensor:
        """The same of integers."""
        torch.distributed.all_reduce(counts, group=self.group)
        return counts

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """[t, heads, dim] each, of all heads -> [T, heads of this rank, dim], one message for the three."""
        k, v = (x.repeat_interleave(_copies(x.shape[1], self.ranks), dim=1) for x in (k, v))
        dealt = [x.unflatten(1, (self.ranks, -1)).transpose(0, 1) for x in (q, k, v)]
        rows = torch.cat([x.flatten(2) for x in dealt], dim=-1).flatten(0, 1)  # [n t, all of one rank]
        received = all_to_all(rows, self._mine(), self.sizes, self.group)
        parts = received.split([x.shape[2] * x.shape[3] for x in dealt], dim=-1)
        return [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, dealt, strict=True)]

    def to_tokens(self, out: Tensor) -> Tensor:
        """[T, heads of this rank, dim] -> [t, heads, dim]."""
        received = all_to_all(out.flatten(1), self.sizes, self._mine(), self.group)
        rows = received.unflatten(0, (self.ranks, -1)).transpose(0, 1)  # [t, n, heads of a rank * dim]
        return rows.reshape(len(rows), -1, out.shape[-1])

    def own_heads(self, spec: AttentionSpec, sinks: Tensor | None) -> tuple[AttentionSpec, Tensor | None]:
        """What attention is between the heads of this rank."""
        heads, kv_heads = spec.num_attention_heads // self.ranks, spec.num_key_value_heads
        own = replace(
            spec,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads * _copies(kv_heads, self.ranks) // self.ranks,
        )
        return own, None if sinks is None else sinks.narrow(0, self.rank * heads, heads)

    def _mine(self) -> list[int]:
        return [self.sizes[self.rank]] * self.ranks


def _copies(kv_heads: int, ranks: int) -> int:
    """How often each head of keys is repeated, that the ranks have as many each. Where ranks divide the
    query heads, they divide them so that a rank's copies are those of its own queries.
    """
    return math.lcm(kv_heads, ranks) // kv_heads


def exchange_bytes(spec: Any, ranks: int, itemsize: int) -> int:
    """What attention keeps of a token because heads were exchanged: the output once more, as it came back,
    and copies of keys and values.
    """
    attention = getattr(spec, "attention", spec)
    heads, dim = attention.num_attention_heads, getattr(spec, "v_head_dim", attention.head_dim)
    more_keys = (_copies(attention.num_key_value_heads, ranks) - 1) * attention.num_key_value_heads
    return itemsize * (heads * dim + more_keys * (attention.head_dim + dim))


def all_to_all(x: Tensor, sizes: list[int], received: list[int], group: Any) -> Tensor:
    """Rows x [sum of sizes, ...], so many for each rank of the group -> those of each rank for this one,
    [sum of received, ...]. Its gradient goes the other way.
    """
    return _AllToAll.apply(x, sizes, received, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sizes, group
        y = x.new_empty(sum(received), *x.shape[1:])
        torch.distributed.all_to_all_single(y, x.contiguous(), received, sizes, group=group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(dy, *ctx.way), None, None, None


class _Sum(torch.autograd.Function):
    """The gradient of a sum that all ranks have is the sum of the gradients that they have of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None
