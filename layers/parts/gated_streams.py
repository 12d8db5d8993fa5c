"""Several residual streams with gates by channel, of low rank (Qwen4, 2026).

A token has n streams X_j of H elements, which begin as copies of its embedding. With N_j = norm(X_j), a norm
of each stream with a weight of its own, a branch f reads their gated mean, and is added to all:

    L = W_up silu(W_down [N_1 .. N_n] / n),     h = mean_j sigmoid(L_j) N_j
    X'_j = X_j + 2 sigmoid(W_inject [N_1 .. N_n] / n)_j f(h)

The gated mean is the branch's norm, too, and that of the last layer's streams the model's. For the backward
pass a connection keeps the streams and what has the low rank; norms and L are made again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels import rms_norm
from liger_models.kernels.streams.gated_streams import added_to_streams, gated_mean
from liger_models.layers.parts.norm import Unnormalised, make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe, recompute
from liger_models.layers.specs import GatedStreamsSpec, ModelSpec, NormSpec


def make_last_norm(spec: ModelSpec) -> Any:
    """Create the norm after the last block, which of gated streams is their mean; without one, the identity.

    Raises:
        ValueError: gated streams and no RMSNorm.
    """
    if not isinstance(spec.streams, GatedStreamsSpec):
        return Unnormalised() if spec.norm is None else make_norm(spec.hidden_size, spec.norm)
    if not isinstance(spec.norm, NormSpec):
        raise ValueError(f"gated streams have an RMSNorm, found {spec.norm}")
    return GatedMean(spec.hidden_size, spec.streams, spec.norm)


class StreamNorm(nn.Module):
    """RMSNorm of each stream, with a weight of its own.

    Args:
        hidden_size: the width H of a stream.
        count: their number n.
        spec: the norm.
    """

    def __init__(self, hidden_size: int, count: int, spec: NormSpec):
        super().__init__()
        if not spec.weighted or spec.float32_stream:
            raise ValueError(
                f"norms of several streams have weights, and streams of their dtype, found {spec}"
            )
        self.count, self.spec = count, spec
        self.weight = nn.Parameter(torch.empty(count * hidden_size))
        self.reset_parameters()

    def reset_parameters(self, *_: Any) -> None:
        """Initialise the factor to one."""
        nn.init.constant_(self.weight, 1.0 - self.spec.offset)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, n H] -> [T, n H]."""
        make = functools.partial(_normed, count=self.count, spec=self.spec)
        return carry_recipe(make(streams, self.weight), make, streams, self.weight, late=True)

    def extra_repr(self) -> str:
        return f"streams={self.count}, {self.spec}"


class GatedMean(nn.Module):
    """The gated mean of the streams, and the norm before it.

    Args:
        hidden_size: the width H of a stream.
        spec: number of streams, and the rank.
        norm: of each stream.
    """

    activation_memory: ActivationMemory = "lean"

    def __init__(self, hidden_size: int, spec: GatedStreamsSpec, norm: NormSpec):
        super().__init__()
        self.hidden_size, self.spec = hidden_size, spec
        self.hc_norm = StreamNorm(hidden_size, spec.count, norm)
        self.input_mix_weight_down = Linear(spec.count * hidden_size, spec.rank, bias=False)
        self.input_mix_weight_up = Linear(spec.rank, spec.count * hidden_size, bias=False)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, n H] -> [T, H]."""
        return self._mean(self.hc_norm(streams))

    def _mean(self, normed: Tensor) -> Tensor:
        low = self.input_mix_weight_down(normed)
        if self.activation_memory == "all":
            return self._gated(low, normed)
        mean: Tensor = recompute(self._gated, low, normed)
        return mean

    def _gated(self, low: Tensor, normed: Tensor) -> Tensor:
        logits = self.input_mix_weight_up(F.silu(low / self.spec.count))
        return gated_mean(logits, normed, self.spec.count)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: the streams, statistics of their norms, and the product of low rank; with
        `all` also the normalised streams and their logits, and the activation.
        """
        count, rank = self.spec.count, self.spec.rank
        more = 2 * count * self.hidden_size + rank if level == "all" else 0
        return itemsize * (count * self.hidden_size + rank + more) + 4 * count

    def extra_repr(self) -> str:
        return f"streams={self.spec.count}, rank={self.spec.rank}"


class GatedConnection(GatedMean):
    """The connection of one branch to the streams."""

    def __init__(self, hidden_size: int, spec: GatedStreamsSpec, norm: NormSpec):
        super().__init__(hidden_size, spec, norm)
        self.block_inject_weight = Linear(spec.count * hidden_size, spec.count, bias=False)

    def forward(self, streams: Tensor) -> Any:
        """streams [T, n H] -> the branch's input [T, H], and weights [T, n] for `add`."""
        normed = self.hc_norm(streams)
        mean = self._mean(normed)
        return mean, 2 * torch.sigmoid(self.block_inject_weight(normed) / self.spec.count)

    def add(self, streams: Tensor, branch: Tensor, weights: Tensor) -> Tensor:
        """The streams after the branch, [T, n H], from its output [T, H]."""
        return added_to_streams(streams, branch, weights)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: also the branch's output, and its weights before and after their factor."""
        return super().activation_bytes(level, itemsize) + itemsize * (self.hidden_size + 2 * self.spec.count)


def _normed(streams: Tensor, weight: Tensor, count: int, spec: NormSpec) -> Tensor:
    parts = zip(streams.chunk(count, 1), weight.chunk(count), strict=True)
    return torch.cat([rms_norm(x, own, spec.eps, spec.offset, spec.cast) for x, own in parts], 1)
