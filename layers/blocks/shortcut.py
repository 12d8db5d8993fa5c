"""The block whose experts skip a layer (ScMoE: Cai et al., 2024, arXiv:2404.05019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class ShortcutBlock(PreNormBlock):
    """A pre-norm layer with experts next to its MLP, or the layer that adds their output (LongCat-Flash,
    2025, arXiv:2509.01322, section 2.2). Both in turn:

        h = x + attention(norm(x));   e = experts(norm(h));   y = h + mlp(norm(h))
        h = y + attention(norm(y));   z = h + mlp(norm(h)) + e

    Raises:
        ValueError: a first layer without experts.
    """

    supports = (*PreNormBlock.supports, "experts")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if spec.experts is not None:
            self.moe = MixtureOfExperts(hidden_size, spec.experts)
            self.makes = (_name(layer),)
        elif layer == 0:
            raise ValueError(f"layer 0 of topology {spec.topology!r} needs experts, found None")
        else:
            self.reads = (_name(layer - 1),)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Any:
        x, residual = self._attended(x, residual, sequences)
        y = self._fed(x, sequences)
        if self.makes:
            return y, residual, self._scaled(self.moe(x, sequences))
        return y + read[0], residual

    def _shared_kv_bytes(self, itemsize: int) -> int:
        return itemsize * self.hidden_size if self.makes else 0


def _name(layer: int) -> str:
    """Name of the output of a layer's experts."""
    return f"experts.{layer}"
