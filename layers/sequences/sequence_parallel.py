"""Sequence parallelism: ranks hold slices of a batch and exchange heads around attention (Ulysses: Jacobs et
al., 2023, arXiv:2309.14509).

Each of n ranks holds a slice of t of the T tokens of a batch; layers that work token by token need no others.
For attention a rank receives all tokens of its share of the heads, and sends their outputs back:

    q, k, v [t, heads, dim]  --all-to-all-->  [T, heads / n, dim]
    attend  [T, heads / n, dim]  --all-to-all-->  [t, heads, dim]

So documents may span slices, and windows, caps, sinks and chunks work as in one process. Positions count in
the whole batch. If ranks share a key head, each gets a copy, and the gradients are summed. A rank sends
t (q + k + v + out) / n elements to each other rank in the forward pass, as many in the backward pass, and
those of the forward pass again in layers that run again (the level `checkpoint`): the other levels keep the
received tensors.

    divide_sequences(model, mesh["sequence"])
    model(batch, labels=labels).loss.backward()          the same batch on every rank of that dimension

Recurrent layers exchange heads too, or pass their states from each rank to the next one, if the ranks cannot
share the heads evenly or the caller asks for it (layers/recurrent/passed.py).

The model cuts each batch into slices that differ by at most one token, without padding. Every rank returns
the loss of the whole batch, and the gradient of a parameter is the mean over the ranks, which DDP and FSDP2
compute as for ranks with batches of their own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels import ChosenBlocks
from liger_models.kernels._dispatch import once_differentiable
from liger_models.layers.specs import (
    AttentionSpec,
    DifferentialAttentionSpec,
    LatentAttentionSpec,
    PooledIndexerSpec,
    RecurrentSpec,
    SharedAttentionSpec,
)

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def divide_sequences(model: Any, mesh: DeviceMesh, pass_states: bool = False) -> Any:
    """Divide each batch of a `CausalLM` over the ranks of a one-dimensional mesh, in place.

    From then on all ranks call the model with the same batches, in the same order. Generation is not divided:
    each rank generates everything.

    Args:
        model: the model.
        mesh: the ranks.
        pass_states: pass the states of all recurrent layers from rank to rank instead of exchanging their
            heads. Less is sent, but ranks wait for one another in documents longer than a slice. Layers whose
            heads do not divide evenly always do so.

    Raises:
        TypeError: not a `CausalLM`, such as a model of another library.
        ValueError: attention without heads, or with heads that do not divide evenly; modules for multi-token
            prediction; a model that draws random numbers in training, which would be the same on every rank.
    """
    ranks = mesh.size()
    if not hasattr(model, "sequence_group"):
        raise TypeError(
            f"a {type(model).__name__} does not support sequence parallelism; models from "
            "liger_models.from_hub do"
        )
    if model.spec.vision is not None or model.spec.audio is not None:
        raise ValueError(
            "multimodal models cannot divide sequences, since the features of an image or a sound lie in one "
            "place of a batch: shard the parameters instead, or load the language model alone "
            "(text_only=True)"
        )
    if model.spec.mtp is not None:
        raise ValueError(
            "models with modules for multi-token prediction cannot divide sequences, since the next token "
            "may be on another rank: shard the parameters instead, or load the model without mtp"
        )
    for i, layer in enumerate(model.layers):
        pooled = isinstance(getattr(layer.spec.mixer, "indexer", None), PooledIndexerSpec)
        if pooled or layer.spec.ngrams is not None:
            found = "attends to blocks of keys by their means" if pooled else "adds embeddings of n-grams"
            raise ValueError(
                f"layer {i} {found}, which may lie on two ranks: sequences cannot be divided; shard the "
                "parameters instead"
            )
    for i, mixer in ((i, mixer) for i, layer in enumerate(model.layers) for mixer in layer.spec.mixers):
        if isinstance(mixer, RecurrentSpec):
            continue
        kinds = AttentionSpec | SharedAttentionSpec | LatentAttentionSpec | DifferentialAttentionSpec
        if isinstance(mixer, kinds):
            heads = mixer.num_attention_heads
        else:
            raise ValueError(
                f"layer {i} mixes tokens by {type(mixer).__name__}, which has no heads that {ranks} ranks "
                "could exchange: sequences cannot be divided"
            )
        if heads % ranks:
            raise ValueError(
                f"layer {i} has {heads} query heads, which {ranks} ranks cannot share "
                "evenly; divide sequences over a number of ranks that divides the heads of every layer"
            )
    if model.spec.draws_in_training:
        raise ValueError(
            "this model draws random numbers in training (dropout, or experts), and ranks that hold slices "
            "of one batch would draw the same ones: sequences cannot be divided. If it has dropout, load it "
            "without (dropout=0.0, or --dropout 0)"
        )
    for module in model.modules():
        if isinstance(getattr(module, "spec", None), RecurrentSpec):
            module.pass_states = pass_states or passes_states(module.spec, ranks)
    model.sequence_group = mesh.get_group() if ranks > 1 else None
    return model


def passes_states(spec: Any, ranks: int) -> bool:
    """Whether ranks cannot share the heads of a recurrent layer evenly, so that its states pass from rank to
    rank.
    """
    return bool(spec.shared_heads[0] % ranks)


class Slice:
    """The tokens of a batch that this rank holds.

    Attributes:
        total: the number of tokens of the batch.
        sizes: the number of tokens of each rank, in order.
        share: the fraction of the tokens on this rank.
        first: the number of tokens on the ranks before this one.

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
        self.first = sum(self.sizes[: self.rank])

    def of(self, tokens: Tensor) -> Tensor:
        """The tokens of this rank: [T, ...] -> [t, ...]."""
        return tokens.narrow(0, self.first, self.sizes[self.rank])

    def gathered(self, tokens: Tensor) -> Tensor:
        """The tokens of all ranks, on every rank: [t, ...] -> [T, ...]."""
        copies = tokens.expand(self.ranks, *tokens.shape).flatten(0, 1)
        return all_to_all(copies, self._mine(), self.sizes, self.group)

    def chosen_by_heads(self, chosen: Tensor | ChosenBlocks) -> Tensor | ChosenBlocks:
        """Keys that all tokens attend to, from those of this rank's tokens: for all heads, or blocks of keys
        for the groups of this rank's heads.
        """
        if not isinstance(chosen, ChosenBlocks):
            return self.gathered(chosen)
        bits = self.gathered(chosen.bits)
        bits = bits.repeat_interleave(_copies(bits.shape[1], self.ranks), dim=1)
        return chosen._replace(bits=bits.chunk(self.ranks, dim=1)[self.rank])

    def summed(self, value: Tensor) -> Tensor:
        """The sum over the ranks, on every rank."""
        return _Sum.apply(value, self.group)

    def counted(self, counts: Tensor) -> Tensor:
        """The sum of integers over the ranks, in place."""
        torch.distributed.all_reduce(counts, group=self.group)
        return counts

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Exchange [t, all heads, dim] for [T, heads of this rank, dim], in one message for q, k and v."""
        k, v = (x.repeat_interleave(_copies(x.shape[1], self.ranks), dim=1) for x in (k, v))
        shapes = [(x.shape[1] // self.ranks, x.shape[2]) for x in (q, k, v)]
        parts = self.dealt(q, k, v).split([heads * dim for heads, dim in shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def dealt(self, *parts: Tensor) -> Tensor:
        """[t, heads, dim] each, whose heads the ranks divide -> this rank's heads next to one another, for
        all tokens, [T, all dims].
        """
        dealt = [x.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(2) for x in parts]
        rows = torch.cat(dealt, dim=-1).flatten(0, 1)  # [n t, all of one rank]
        return all_to_all(rows, self._mine(), self.sizes, self.group)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Exchange [T, heads of this rank, dim] for [t, all heads, dim]."""
        received = all_to_all(out.flatten(1), self.sizes, self._mine(), self.group)
        rows = received.unflatten(0, (self.ranks, -1)).transpose(0, 1)  # [t, n, heads of a rank * dim]
        return rows.reshape(len(rows), -1, out.shape[-1])

    def send(self, output: Tensor, message: Tensor, trained: bool) -> Tensor:
        """Send a message to the next rank, and return `output`. Its gradient waits for the message's, which
        the next rank sends back if `trained`.
        """
        # The anchor makes gradients come back even if nothing on this rank needs them, since they are sent.
        anchor = torch.zeros((), requires_grad=trained)
        return _Send.apply(anchor, output, message, self.group, self.rank + 1, trained)

    def receive(self, like: Tensor, trained: bool) -> Tensor:
        """A message of the shape and dtype of `like` from the rank before this one."""
        anchor = torch.zeros((), requires_grad=trained)
        return _Receive.apply(anchor, torch.empty_like(like, memory_format=torch.contiguous_format), self)

    def own_heads(self, spec: AttentionSpec, sinks: Tensor | None) -> tuple[AttentionSpec, Tensor | None]:
        """The spec and the sinks of this rank's heads."""
        heads, kv_heads = spec.num_attention_heads // self.ranks, spec.num_key_value_heads
        own = replace(
            spec,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads * _copies(kv_heads, self.ranks) // self.ranks,
            slopes=None if spec.slopes is None else spec.slopes[self.rank * heads : (self.rank + 1) * heads],
        )
        return own, None if sinks is None else sinks.narrow(0, self.rank * heads, heads)

    def _mine(self) -> list[int]:
        return [self.sizes[self.rank]] * self.ranks


def _copies(kv_heads: int, ranks: int) -> int:
    """The number of copies of each key head that gives every rank equally many. A rank's copies match its own
    query heads.
    """
    return math.lcm(kv_heads, ranks) // kv_heads


def exchange_bytes(spec: Any, ranks: int, itemsize: int, pass_states: bool = False) -> int:
    """Bytes kept per token because heads are exchanged: the returned output, and copied keys and values. If
    states pass instead, as recurrent layers may be asked to: the convolution's inputs, next to the last ones
    of the rank before, unless their own memory is freed.
    """
    if isinstance(spec, RecurrentSpec):
        passed = pass_states or passes_states(spec, ranks)
        return itemsize * (min(spec.conv_size, spec.exchanged_size) if passed else spec.exchanged_size)
    attention = getattr(spec, "attention", spec)
    heads = attention.num_attention_heads
    dim = getattr(spec, "v_head_dim", None) or attention.head_dim
    more_keys = (_copies(attention.num_key_value_heads, ranks) - 1) * attention.num_key_value_heads
    return itemsize * (heads * dim + more_keys * (attention.head_dim + dim))


def all_to_all(x: Tensor, sizes: list[int], received: list[int], group: Any) -> Tensor:
    """Send `sizes` rows of x to each rank of the group, and return the `received` rows from each. The
    gradient takes the opposite way.
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
    """Sum over ranks; its gradient is the sum of the ranks' gradients."""

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


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, output: Tensor, message: Tensor, group: Any, rank: int, trained: bool
    ) -> Tensor:
        ctx.group, ctx.rank, ctx.trained = group, rank, trained
        ctx.like = message.shape, message.dtype, message.device
        torch.distributed.send(message.detach().contiguous(), group=group, group_dst=rank)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor) -> tuple[None, Tensor, Tensor | None, None, None, None]:
        gradient = None
        if ctx.trained:
            shape, dtype, device = ctx.like
            gradient = torch.empty(shape, dtype=dtype, device=device)
            torch.distributed.recv(gradient, group=ctx.group, group_src=ctx.rank)
        return None, doutput, gradient, None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, message: Tensor, slice: Slice) -> Tensor:
        ctx.way = slice.group, slice.rank - 1
        torch.distributed.recv(message, group=slice.group, group_src=slice.rank - 1)
        ctx.mark_dirty(message)
        return message

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        group, rank = ctx.way
        torch.distributed.send(gradient.contiguous(), group=group, group_dst=rank)
        return None, None, None
