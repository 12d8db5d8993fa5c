"""The token mixers of a conformer (Gulati et al., 2020, arXiv:2005.08100), an encoder of sound."""

from __future__ import annotations

from dataclasses import dataclass

from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.norms import NormSpec
from liger_models.layers.specs.rotary import RopeSpec


@dataclass(frozen=True)
class LocalAttentionSpec:
    """Attention to the last `window` frames, the frame itself among them, with relative positions and capped
    scores: layers/conformer/local_attention.py. `q_scale` and `k_scale` multiply queries and keys. `clipped`
    projections clamp to stored bounds: layers/projections/clipped_linear.py.
    """

    num_attention_heads: int
    head_dim: int
    q_scale: float
    k_scale: float
    window: int
    softcap: float
    clipped: bool = False

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()


@dataclass(frozen=True)
class LightConvSpec:
    """A gated projection, a causal depthwise convolution of `width` frames, a norm and an activation:
    layers/conformer/light_conv.py. The convolution's output is clamped to +-`bound`. `norm` applies also to
    the norm before the mixer.
    """

    width: int
    norm: NormSpec
    activation: Activation = "silu"
    bound: float | None = None
    clipped: bool = False

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()
