"""The short convolution of a recurrent mixer: kernels/recurrent/short_conv.py with its weight."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import permuted
from liger_models.kernels import conv_state, gated_short_conv, short_conv, short_conv_step
from liger_models.layers.recompute.activation_memory import carry_recipe, carry_recipes
from liger_models.layers.recurrent.parts import split_heads

Share = tuple[int, int]
WHOLE: Share = (0, 1)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution, over `channels` that are then split into `heads`.

    The weight is [C, K] here and [C, 1, K] in checkpoints, as in torch's convolution.

    Args:
        heads: (number, width) of the heads in each part of the channels, such as queries, keys and values.
        width: number of taps K.
        bias: whether channels have a bias.
        names: of the parts, where checkpoints store the taps of each part as a module of its own.
        activation: "silu", or None.
    """

    stacked_vectors = ("weight",)  # the taps of each channel

    def __init__(
        self,
        heads: tuple[tuple[int, int], ...],
        width: int,
        bias: bool = False,
        names: tuple[str, ...] = (),
        activation: str | None = "silu",
    ):
        super().__init__()
        self.heads, self.names, self.activation = heads, names, activation
        self.channels, self.taps = sum(number * size for number, size in heads), width
        self.weight = nn.Parameter(torch.empty(self.channels, width))
        self.bias = nn.Parameter(torch.empty(self.channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw from a normal distribution, like every matrix; a bias is zero."""
        nn.init.normal_(self.weight, 0.0, std, generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def canonical_form(self, path: str, name: str) -> Expr:
        """Expression of [C, K] from a [C, 1, K], or from one such tensor for each part. A bias has
        one form.
        """
        if name == "bias":
            return Ref(f"{path}.{name}", (len(self.weight),))
        channels, width = shape_of(self.weight)
        order = "c 1 k -> (c 1) k"
        if not self.names:
            return permuted(f"{path}.{name}", (channels, width), order)
        owner = path.rpartition(".")[0]
        parts = zip(self.names, self.heads, strict=True)
        return Cat(
            tuple(permuted(f"{owner}.{part}.{name}", (n * size, width), order) for part, (n, size) in parts)
        )

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None,
        state: Tensor | None = None,
        share: Share = WHOLE,
        gated: bool = False,
        before: int = 0,
    ) -> tuple[Tensor, ...]:
        """x [T, C] -> each part [T, heads, width]; of gated inputs all channels, [T, C].

        Args:
            documents: [n + 1], boundaries of the documents; None for one.
            bounds: `document_bounds` of the same.
            state: [n, K - 1, C], the inputs before each document; None for zeros.
            share: (index, count): x has this share of the heads in each part.
            gated: x [T, 3 C] holds a gate of the inputs, a gate of the outputs, and the inputs.
            before: inputs at the start of x that give no outputs.
        """
        operands = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        if gated:
            gate = functools.partial(gated_short_conv, bounds=bounds)
            return (carry_recipe(gate(*operands), gate, *operands, late=True),)
        if state is None:
            make = functools.partial(self._parts, bounds=bounds, share=share, before=before)
            return carry_recipes(make(*operands), make, *operands, late=True, deep=True)
        y = short_conv(
            x, self.weight, self.bias, activation=self.activation, cu_seqlens=documents, state=state
        )
        return self._split(y)

    def step(self, x: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Process one further token of each sequence: x [batch, C], state [batch, K - 1, C] -> the parts, and
        the next state.
        """
        y, state = short_conv_step(x, self.weight, self.bias, state, self.activation)
        return self._split(y), state

    def next_state(self, x: Tensor, documents: Tensor | None, state: Tensor | None) -> Tensor:
        """Return the last K - 1 inputs of each document, [n, K - 1, C]."""
        return conv_state(x, documents, self.weight.shape[1], state)

    def _parts(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        bounds: Tensor | None,
        share: Share,
        before: int = 0,
    ) -> tuple[Tensor, ...]:
        if share != WHOLE:
            weight, bias = self._shared(weight, share), None if bias is None else self._shared(bias, share)
        y = short_conv(x, weight, bias, activation=self.activation, bounds=bounds)
        return self._split(y[before:] if before else y, share[1])

    def _shared(self, channels: Tensor, share: Share) -> Tensor:
        """Rows of this share of the heads in each part."""
        parts = channels.split([number * size for number, size in self.heads])
        return torch.cat([part.chunk(share[1])[share[0]] for part in parts])

    def _split(self, y: Tensor, ranks: int = 1) -> tuple[Tensor, ...]:
        heads = [(number // ranks, size) for number, size in self.heads]
        return split_heads(y, heads)

    def extra_repr(self) -> str:
        channels, width = shape_of(self.weight)
        return f"{channels} channels, width={width}"
