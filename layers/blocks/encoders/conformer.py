"""Blocks of conformers: two MLPs around attention and a convolution (Gulati et al., 2020, arXiv:2005.08100,
section 2.4).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import DISTANCES, Block, Streams
from liger_models.layers.conformer.clip import clip
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec, DistanceAttentionSpec, LightConvSpec, MLPSpec


class ConformerBlock(Block):
    """`h = x + s mlp(norm(x)); i = h + attention(norm(h)); j = i + conv(norm(i)); y = norm(j + s
    mlp'(norm(j)))`, s the `residual_scale`.
    """

    supports: tuple[str, ...] = ("second_mixer",)
    needs = ("mixer", "second_mixer", "mlp")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if not isinstance(spec.mlp, MLPSpec) or not isinstance(spec.second_mixer, LightConvSpec):
            kinds = [type(part).__name__ for part in (spec.second_mixer, spec.mlp)]
            raise ValueError(f"the parts are {kinds}; expected a light convolution and an MLP")
        self.reads = (DISTANCES,) if isinstance(spec.mixer, DistanceAttentionSpec) else ()
        self.first_mlp = make_mlp(hidden_size, spec.mlp)
        self.first_layernorm = make_norm(hidden_size, spec.norm)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.conv_layernorm = make_norm(hidden_size, spec.second_mixer.norm)
        self.pre_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.final_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Streams:
        attention, convolution = self.mixers
        x = x if residual is None else x + residual
        x = x + self._scaled(self._made("post_first_", self.first_mlp(self._normed("first_", x))))
        x = x + self._made("post_attention_", attention(self._normed("input_", x), sequences, *read))
        x = x + convolution(self.conv_layernorm(x), sequences)
        branch = self.mlp(self._normed("pre_feedforward_", x), sequences)
        x = x + self._scaled(self._made("post_feedforward_", branch))
        return self._normed("final_", x), None

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm: nn.Module = getattr(self, f"{name}layernorm")
        return norm(x)

    def _made(self, name: str, branch: Any) -> Tensor:
        """The output of a branch as it is added."""
        return branch

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 5 if level == "all" else 0  # the norms before the branches, and the layer's output


class ConformerSandwichBlock(ConformerBlock):
    """`h = x + s norm(mlp(norm(x))); i = h + norm(attention(norm(h))); j = i + conv(norm(i)); y = norm(j + s
    norm(mlp'(norm(j))))`, with clamped inputs of norms (Gemma 4).
    """

    supports = ("second_mixer", "bound")
    norms_after_branches = 3

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.post_first_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return super()._normed(name, clip(x, self.spec.bound))

    def _made(self, name: str, branch: Tensor) -> Tensor:
        return self._normed(name, branch)

    def _clip_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        own = 0 if self.spec.bound is None else 7 * self.hidden_size
        return super()._clip_bytes(level, itemsize) + own
