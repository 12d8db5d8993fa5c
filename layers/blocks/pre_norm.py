"""The pre-norm block of LLaMA, Mistral and Qwen."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Block, add_and_norm
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec


class PreNormBlock(Block):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen. Each of the two branches may be multiplied by one of the `branch_scales`. Latent attention
    may read the latents of an earlier layer.
    """

    has_room_for: tuple[str, ...] = ("dropout", "branch_scales", "latents of another layer")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Any:
        x, residual, *made = self._attended(x, residual, sequences, *read)
        return self._fed(x, sequences), residual, *made

    def _attended(
        self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor
    ) -> tuple[Tensor, ...]:
        """The input of the MLP, normalised, the stream after attention, and the latents that others read."""
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        attended = self.token_mixer(x, sequences, *read)
        x, *made = attended if isinstance(attended, tuple) else (attended,)
        x = self._scaled(self._branch(0, self._dropped(x)))
        return (*add_and_norm(self.post_attention_layernorm, x, residual), *made)

    def _fed(self, x: Tensor, sequences: Sequences) -> Tensor:
        """The MLP's branch, of normalised x."""
        return self._scaled(self._branch(2, self._dropped(self.mlp(x, sequences))))

    def _branch(self, number: int, y: Tensor) -> Tensor:
        scale = self.spec.branch_scales[number]
        return y if scale == 1.0 else y * scale

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0
