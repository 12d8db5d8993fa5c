"""A short convolution added to its input, and its last inputs as a state (Inkling, 2026).

    y = s * (x + conv(x)),   the convolution restarting at every document

The last tap multiplies the input, so with w the weight and s a factor, both in float32, y is the convolution
of x by s * (w + [0 .. 0 1]), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels import conv_state, short_conv, short_conv_step
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe, carry_recipes
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.sequences import Sequences


class ResidualConvolution(ShortConvolution):
    """Short convolutions of the heads of a layer, each added to its input.

    Args:
        heads: (number, width) of the heads in each part of the channels.
        width: number of taps K.
        layer: the index of the layer in the model, and in a cache.
        number: of the first part among the convolutions of the layer's cache.
        names: of the parts, where checkpoints store the taps of each part as a module of its own.
    """

    def __init__(
        self,
        heads: tuple[tuple[int, int], ...],
        width: int,
        layer: int,
        number: int,
        names: tuple[str, ...] = (),
    ):
        super().__init__(heads, width, names=names, activation=None)
        self.layer, self.number = layer, number

    def forward(  # type: ignore[override]
        self, x: Tensor, sequences: Sequences, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """x [T, C], scale [1] or None -> each part [T, heads, width]."""
        operands = (x, self.weight) if scale is None else (x, self.weight, scale)
        if sequences.cache is not None:
            return self._continued(*operands, sequences=sequences)
        bounds = sequences.documents.bounds()

        def make(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
            operands = (weight,) if scale is None else (weight, scale)
            taps = carry_recipe(taps_with_input(*operands), taps_with_input, *operands, late=True)
            return self._split(short_conv(x, taps, bounds=bounds))

        return carry_recipes(make(*operands), make, *operands, late=True, deep=True)

    def _continued(
        self, x: Tensor, weight: Tensor, scale: Tensor | None = None, *, sequences: Sequences
    ) -> tuple[Tensor, ...]:
        """The parts of new tokens, whose documents are the rows of a cache."""
        cache, taps = sequences.cache, taps_with_input(weight)
        assert cache is not None
        x = x if scale is None else (x * scale).to(x.dtype)
        found = cache.inputs(self.layer, self.number, len(self.heads))
        before = None if found is None else torch.cat(found, -1).to(x.dtype)
        if (real := cache.real_tokens()) is not None:
            tokens, rows = real
            new = x[tokens]
            y = short_conv(new, taps, cu_seqlens=rows, state=before)
            y = torch.zeros_like(x).index_copy(0, tokens, y)
            after = conv_state(new, rows, self.taps, before)
        elif before is not None and cache.newest == 1 and len(x) == len(before):
            y, after = short_conv_step(x, taps, None, before)
        else:
            rows = sequences.documents.boundaries()
            y = short_conv(x, taps, cu_seqlens=rows, state=before)
            after = conv_state(x, rows, self.taps, before)
        cache.keep_inputs(self.layer, self.number, *after.split([n * size for n, size in self.heads], -1))
        return self._split(y)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token: the input."""
        return itemsize * self.channels

    def new_cache(self, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the last inputs of each part, [batch, K - 1, channels]."""
        shapes = [(batch, self.taps - 1, number * size) for number, size in self.heads]
        return tuple(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)


def taps_with_input(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * (weight + [0 .. 0 1]), [C, K] in float32 or wider."""
    wide = at_least_float32(weight)
    wide = torch.cat([wide[:, :-1], wide[:, -1:] + 1], dim=1)
    return wide if scale is None else wide * at_least_float32(scale)
