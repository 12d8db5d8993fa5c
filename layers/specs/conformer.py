"""The token mixers of a conformer (Gulati et al., 2020, arXiv:2005.08100), an encoder of sound."""

from __future__ import annotations

from dataclasses import dataclass

from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.rotary import RopeSpec


@dataclass(frozen=True)
class _ClipAttentionSpec:
    """Heads of attention within the clips of a batch, without rotary positions."""

    num_attention_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()


@dataclass(frozen=True)
class LocalAttentionSpec(_ClipAttentionSpec):
    """Attention to the last `window` frames, the frame itself among them, with relative positions and capped
    scores: layers/conformer/local_attention.py. `q_scale` and `k_scale` multiply queries and keys. `clipped`
    projections clamp to stored bounds: layers/projections/clipped_linear.py.
    """

    q_scale: float
    k_scale: float
    window: int
    softcap: float
    clipped: bool = False

    @property
    def block(self) -> int:
        """The number of frames that are computed together, which is the largest distance that is seen."""
        return max(1, self.window - 1)


@dataclass(frozen=True)
class DistanceAttentionSpec(_ClipAttentionSpec):
    """Attention of all frames of a clip to one another, with a bias by distance from a table that layers
    share: layers/conformer/distance_attention.py.
    """

    scale: float


@dataclass(frozen=True)
class RelativeAttentionSpec(_ClipAttentionSpec):
    """Attention of all frames of a clip to one another, with relative positions and two learned biases of
    queries: layers/conformer/relative_attention.py. With `bias`, projections have one.
    """

    scale: float
    bias: bool = True


@dataclass(frozen=True)
class ContextAttentionSpec(_ClipAttentionSpec):
    """Attention within blocks of `context` frames of a clip, with learned vectors for distances of up to
    `distances` frames: layers/conformer/context_attention.py. The output projection alone has a bias.
    """

    scale: float
    context: int
    distances: int


@dataclass(frozen=True)
class LightConvSpec:
    """A gated projection, a causal depthwise convolution of `width` frames, a norm and an activation:
    layers/conformer/light_conv.py. The convolution's output is clamped to +-`bound`. `norm` applies also to
    the norm before the mixer. If `separable`, projections are convolutions of one frame, all have biases,
    a gate of activation `gate` and its factor have further ones, and another such convolution is in the
    norm's place. If `centred`, projections are convolutions of one frame, too, the depthwise one reads as
    many frames after each frame as before it, all have a `bias` or none, and a batch norm with stored moments
    is in the norm's place; with `depthwise_bias` false the depthwise one has none. The convolution has
    `expansion` times as many channels as the hidden states.
    """

    width: int
    norm: NormSpec | LayerNormSpec
    activation: Activation = "silu"
    bound: float | None = None
    clipped: bool = False
    separable: bool = False
    gate: Activation = "silu"
    centred: bool = False
    bias: bool = False
    depthwise_bias: bool = True
    expansion: int = 1

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()
