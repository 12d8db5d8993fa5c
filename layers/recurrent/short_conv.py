"""The short convolution of a recurrent mixer: kernels/recurrent/short_conv.py with its weight."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Expr
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import permuted
from liger_models.kernels import conv_state, short_conv, short_conv_step
from liger_models.layers.recompute.activation_memory import carry_recipes

Share = tuple[int, int]
WHOLE: Share = (0, 1)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution with SiLU, over `channels` that are then split into `heads`.

    The weight is [C, K] here and [C, 1, K] in checkpoints, as torch's convolution has it.

    Args:
        heads: (number, width) of the heads in each part of the channels, such as queries, keys and values.
        width: taps K.
    """

    activation = "silu"
    stacked_vectors = ("weight",)
    stacked_vectors = ("weight",)  # the taps of each channel

    def __init__(self, heads: tuple[tuple[int, int], ...], width: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(sum(number * size for number, size in heads), width))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """From a normal distribution, as every matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)

    def canonical_form(self, path: str, name: str) -> Expr:
        """[C, K] from a checkpoint's [C, 1, K]."""
        return permuted(f"{path}.{name}", shape_of(self.weight), "c 1 k -> (c 1) k")

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None,
        state: Tensor | None = None,
        share: Share = WHOLE,
    ) -> tuple[Tensor, ...]:
        """x [T, C] -> each part [T, heads, width].

        Args:
            documents: [n + 1], where they begin and end; None for one.
            bounds: `document_bounds` of the same.
            state: [n, K - 1, C], the inputs before each document; None for zeros.
            share: (number, of how many): x has this share of the heads in each part.
        """
        if state is None:
            make = functools.partial(self._parts, bounds=bounds, share=share)
            return carry_recipes(make(x, self.weight), make, x, self.weight)
        y = short_conv(x, self.weight, activation=self.activation, cu_seqlens=documents, state=state)
        return self._split(y)

    def step(self, x: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """One further token of each sequence: x [batch, C], state [batch, K - 1, C] -> the parts, and the
        next state.
        """
        y, state = short_conv_step(x, self.weight, None, state, self.activation)
        return self._split(y), state

    def next_state(self, x: Tensor, documents: Tensor | None, state: Tensor | None) -> Tensor:
        """The last K - 1 inputs of each document, [n, K - 1, C]."""
        return conv_state(x, documents, self.weight.shape[1], state)

    def _parts(self, x: Tensor, weight: Tensor, *, bounds: Tensor | None, share: Share) -> tuple[Tensor, ...]:
        if share != WHOLE:
            parts = weight.split([number * size for number, size in self.heads])
            weight = torch.cat([part.chunk(share[1])[share[0]] for part in parts])
        return self._split(short_conv(x, weight, activation=self.activation, bounds=bounds), share[1])

    def _split(self, y: Tensor, ranks: int = 1) -> tuple[Tensor, ...]:
        heads = [(number // ranks, size) for number, size in self.heads]
        parts = y.split([number * size for number, size in heads], dim=-1)
        return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, heads, strict=True))

    def extra_repr(self) -> str:
        channels, width = shape_of(self.weight)
        return f"{channels} channels, width={width}"
