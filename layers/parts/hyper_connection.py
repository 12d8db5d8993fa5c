"""Several residual streams: manifold-constrained hyper-connections (mHC: Xie et al., 2025, arXiv:2512.24880).

A token has n streams X_i of H elements. Before a branch f they are summed by weights, and its output is added
to mixtures of them:

    z = W [X_1 .. X_n] / rms(X_1 .. X_n),     pre | post | mix = split(scale * z + base)     n | n | n x n
    h = sum_i (sigmoid(pre_i) + eps) X_i,     X'_j = 2 sigmoid(post_j) f(h) + sum_i M_ij X_i

M is softmax(mix) + eps over its rows, whose columns and rows are then divided by their sums in turn, so that
all sums are close to one (Sinkhorn and Knopp, 1967). With no iterations streams are not mixed: M is the
identity, and the weights of f(h) are magnitude sigmoid(post_j) + eps (Hunyuan 4, 2026). At the end of a model
the streams are summed by weights of the same form as `pre`, or averaged. Weights are computed in float32;
they are the same for all elements of a stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from liger_models.kernels._dispatch import use_triton
from liger_models.kernels.streams.streams import mixed_streams, weighted_streams
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.specs import StreamsSpec


class HyperConnection(nn.Module):
    """The connection of one branch to the streams.

    Args:
        hidden_size: the width H of a stream.
        spec: number of streams, and of iterations.
    """

    stacked_vectors = ("fn",)  # whose dtype may be wider than that of other matrices

    def __init__(self, hidden_size: int, spec: StreamsSpec):
        super().__init__()
        self.spec, count = spec, spec.count
        rows = (2 + count if spec.iterations else 2) * count
        self.fn = nn.Parameter(torch.empty(rows, count * hidden_size))
        self.base = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(3 if spec.iterations else 2))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise as `_reset` says."""
        _reset(self.fn, self.base, self.scale, self.spec, std, generator)

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """streams [T, n H] -> the branch's input [T, H], and for `add` the weights of the branch's output
        [T, n] and, if streams are mixed, M [T, n, n], in at least float32.
        """
        return _weighted(streams, self.fn, self.base, self.scale, self.spec)

    def add(self, streams: Tensor, branch: Tensor, post: Tensor, mixture: Tensor | None = None) -> Tensor:
        """The streams after the branch, [T, n H], from its output [T, H]."""
        return mixed_streams(streams, branch, post, mixture)

    def extra_repr(self) -> str:
        return f"streams={self.spec.count}, iterations={self.spec.iterations}"


class StreamsHead(nn.Module):
    """The streams of a model summed by weights or averaged at its end; at its beginning they are equal.

    Args:
        hidden_size: the width H of a stream.
        spec: their number.
    """

    stacked_vectors = ("fn",)

    def __init__(self, hidden_size: int, spec: StreamsSpec):
        super().__init__()
        self.spec = spec
        if not spec.weighted_head:
            return
        self.fn = nn.Parameter(torch.empty(spec.count, spec.count * hidden_size))
        self.base = nn.Parameter(torch.empty(spec.count))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise as `_reset` says."""
        if self.spec.weighted_head:
            _reset(self.fn, self.base, self.scale, self.spec, std, generator)

    def forward(self, streams: Tensor) -> Tensor:
        """streams [T, n H] -> [T, H]."""
        if not self.spec.weighted_head:
            return streams.unflatten(-1, (self.spec.count, -1)).mean(1)
        return _weighted(streams, self.fn, self.base, self.scale, self.spec)[0]

    def extra_repr(self) -> str:
        return f"streams={self.spec.count}"


def _reset(
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    spec: StreamsSpec,
    std: float,
    generator: torch.Generator | None,
) -> None:
    """Initialise the matrix from a normal distribution, biases with zeros and factors with ones. Streams that
    are not mixed begin near their mean: with factors of 0.01, and biases with which weights sum to one.
    """
    nn.init.normal_(fn, 0.0, std, generator)
    nn.init.zeros_(base)
    nn.init.ones_(scale)
    if not spec.iterations:
        nn.init.constant_(scale, 0.01)
        nn.init.constant_(base[: spec.count], -math.log(max(spec.count - 1, 1)))


def _weighted(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: StreamsSpec
) -> tuple[Tensor, ...]:
    """The streams' sum, and the ways back to them. What the plain twin computes is made again in the backward
    pass, as the kernels do.
    """
    function: Callable[..., tuple[Tensor, ...]] = functools.partial(
        weighted_streams,
        count=spec.count,
        iterations=spec.iterations,
        eps=spec.eps,
        norm_eps=spec.norm_eps,
        magnitude=spec.magnitude,
    )
    if use_triton(streams, fn, base, scale):
        return function(streams, fn, base, scale)
    found: tuple[Tensor, ...] = recompute(function, streams, fn, base, scale)
    return found
