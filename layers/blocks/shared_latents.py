"""The block whose attention shares the latents of keys and values with other layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import add_and_norm, latents
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec, LatentAttentionSpec


class SharedLatentsBlock(PreNormBlock):
    """A pre-norm layer whose latent attention reads the latents of an earlier layer, or returns its own for
    later ones (Mistral Large 4).

    Raises:
        ValueError: another kind of attention.
    """

    supports: tuple[str, ...] = ("latents of another layer",)

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if not isinstance(spec.mixer, LatentAttentionSpec):
            raise ValueError(f"layers of topology {spec.topology!r} need latent attention")
        if spec.mixer.latents_of is not None:
            self.reads = latents(spec.mixer.latents_of)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Any:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        attended = self.token_mixer(x, sequences, *read)
        x, *made = attended if self.makes else (attended,)
        x, residual = add_and_norm(self.post_attention_layernorm, self._scaled(x), residual)
        return self._fed(x, sequences), residual, *made
