"""The pre-norm block of LLaMA, Mistral and Qwen, one whose MLP alone has a norm, one with convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, Streams, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.residual_conv import ResidualConvolution
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    BlockSpec,
    ConvolvedAttentionSpec,
    GatedNormSpec,
    LayerNormSpec,
    MLPSpec,
    NormSpec,
)


class PreNormBlock(Block):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen. Each of the two branches may be multiplied by one of the `branch_scales`.
    """

    supports: tuple[str, ...] = ("dropout", "branch_scales", "norms with gates", "plain_mlp_norm")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, _before_mlp(spec))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = self._attended(x, residual, sequences)
        return self._fed(x, sequences), residual

    def _attended(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The input of the MLP, normalised, and the stream after attention."""
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._of_part(0, self.token_mixer, x, sequences)
        return add_and_norm(self.post_attention_layernorm, x, residual)

    def _fed(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The MLP's branch, of normalised x."""
        return self._of_part(2, self.mlp, x, sequences)

    def _of_part(self, number: int, part: Any, x: Tensor, sequences: Sequences) -> Tensor:
        """A branch: the output of a mixer or an MLP times its factors."""
        if self.branch_dropout is None and self.spec.branch_scales[number] == 1.0:
            return self._branch_of(part, x, sequences)
        return self._scaled(self._branch(number, self._dropped(part(x, sequences))))

    def _branch(self, number: int, y: Tensor) -> Tensor:
        scale = self.spec.branch_scales[number]
        return y if scale == 1.0 else y * scale

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class MLPNormBlock(PreNormBlock):
    """`h = x + attention(x); y = h + mlp(norm(h))`: the first layer of ModernBERT (arXiv:2412.13663), whose
    input, the embedding, was normalised.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        del self.input_layernorm

    def _attended(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        return add_and_norm(
            self.post_attention_layernorm, self._of_part(0, self.token_mixer, x, sequences), x
        )

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 1  # attention's own input


class ConvolvedBlock(PreNormBlock):
    """`h = x + c(attention(norm(x))); y = h + c(s * mlp(norm(h)))` (Inkling, 2026), each c with weights of
    its own: c(x) = x + conv(x). s is a learned number, or one if there are experts.

    Raises:
        ValueError: another mixer than convolved attention.
    """

    supports = ()

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if not isinstance(spec.mixer, ConvolvedAttentionSpec):
            raise ValueError(f"layers of topology {spec.topology!r} convolve attention, found {spec.mixer}")
        # Those of keys and values have the numbers 0 and 1.
        self.attn_sconv = ResidualConvolution(((1, hidden_size),), spec.mixer.conv, layer, 2)
        self.mlp_sconv = ResidualConvolution(((1, hidden_size),), spec.mixer.conv, layer, 3)
        self.mlp_scale = nn.Parameter(torch.ones(1)) if isinstance(spec.mlp, MLPSpec) else None

    def reset_parameters(self, *_: object) -> None:
        """Set the MLP's scale to one; all else is in modules of its own."""
        if self.mlp_scale is not None:
            nn.init.ones_(self.mlp_scale)

    def _of_part(self, number: int, part: Any, x: Tensor, sequences: Sequences) -> Tensor:
        y = self._branch_of(part, x, sequences)
        if number == 0:
            return self.attn_sconv(y, sequences)[0].flatten(1)
        return self.mlp_sconv(y, sequences, self.mlp_scale)[0].flatten(1)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values, and the last inputs of the convolutions of keys, values and both branches."""
        tokens, _ = super().new_cache(batch, max_length, device, dtype)
        mixer: Any = self.token_mixer
        convolutions = mixer.kv_sconv, self.attn_sconv, self.mlp_sconv
        return tokens, tuple(x for conv in convolutions for x in conv.new_cache(batch, device, dtype))


def _before_mlp(spec: BlockSpec) -> NormSpec | LayerNormSpec | GatedNormSpec:
    """The norm before the MLP.

    Raises:
        ValueError: `plain_mlp_norm` with a norm that has no gate.
    """
    if not spec.plain_mlp_norm:
        return spec.norm
    if not isinstance(spec.norm, GatedNormSpec):
        raise ValueError(f"plain_mlp_norm is for a norm with a gate, found {spec.norm}")
    return spec.norm.norm
