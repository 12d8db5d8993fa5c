"""Attention to convolved keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from liger_models.layers.specs.attention import AttentionSpec, Heads
from liger_models.layers.specs.norms import NormSpec
from liger_models.layers.specs.rotary import QueryScaleSpec, RopeSpec


@dataclass(frozen=True)
class ConvolvedAttentionSpec(Heads):
    """Causal attention to convolved keys and values, with learned scores by distance:
    layers/recurrent/convolved_attention.py.

    `norm` is that of each head of queries and keys, and `conv` the number of taps of the convolutions. Scores
    of distances below `extent` come from vectors of `distance_dim` elements per query and head. `window` and
    `query_scale` are as in `AttentionSpec`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    norm: NormSpec
    extent: int
    distance_dim: int = 16
    conv: int = 4
    window: int | None = None
    query_scale: QueryScaleSpec | None = None

    @property
    def r_size(self) -> int:
        """Width of the vectors that scores by distance come from, over all heads."""
        return self.num_attention_heads * self.distance_dim

    @property
    def attention(self) -> AttentionSpec:
        """The attention product, without its scores by distance."""
        heads = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return AttentionSpec(*heads, self.scale, window=self.window)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()
