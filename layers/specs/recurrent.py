"""Recurrent mixers: layers that carry a state from token to token instead of attending to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.rotary import RopeSpec

Projections = Literal["qkvz", "qkv", "apart"]


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule, with one decay for each value head (Yang et al., 2024,
    arXiv:2412.06464), after a causal depthwise convolution of queries, keys and values.

    Each key head serves `value_heads / key_heads` value heads in a row. `conv` is the width of the
    convolution. `beta_scale` multiplies the learning rate. `norm_eps` is that of the norm of each value
    head's output, which is gated.
    `projections` says which of the input projections checkpoints hold as one matrix: "qkvz", queries, keys,
    values and the output gate (Qwen3-Next); "qkv", all but the gate (Qwen3.5); "apart", none.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    beta_scale: float = 1.0
    norm_eps: float = 1e-6
    projections: Projections = "qkv"

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def state_flops(self) -> int:
        """Operations of the rule for each token, one token at a time: a decay, a read, a write and a query of
        every state.
        """
        return 7 * self.value_heads * self.key_dim * self.value_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """No positions."""
        return ()


RecurrentSpec = GatedDeltaSpec
"""Mixers that carry a state."""
