"""One layer: its parts and topology.

Each layer of a model has its own `BlockSpec`, so a pattern over layers (a sliding window on some, full
attention on others) is a tuple, not a flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.attention import (
    AttentionSpec,
    CompressedAttentionSpec,
    CrossAttentionSpec,
    DifferentialAttentionSpec,
    GridAttentionSpec,
    GridConvSpec,
    LatentAttentionSpec,
    SharedAttentionSpec,
)
from liger_models.layers.specs.conformer import (
    ContextAttentionSpec,
    DistanceAttentionSpec,
    LightConvSpec,
    LocalAttentionSpec,
    RelativeAttentionSpec,
)
from liger_models.layers.specs.convolved import ConvolvedAttentionSpec
from liger_models.layers.specs.mlp import MLPSpec, MoESpec, NgramSpec, PerLayerInputSpec
from liger_models.layers.specs.norms import GatedNormSpec, LayerNormSpec, NormSpec
from liger_models.layers.specs.recurrent import RecurrentSpec
from liger_models.layers.specs.rotary import RopeSpec

MixerSpec = (
    AttentionSpec
    | SharedAttentionSpec
    | LatentAttentionSpec
    | CompressedAttentionSpec
    | DifferentialAttentionSpec
    | ConvolvedAttentionSpec
    | CrossAttentionSpec
    | GridAttentionSpec
    | GridConvSpec
    | LocalAttentionSpec
    | DistanceAttentionSpec
    | RelativeAttentionSpec
    | ContextAttentionSpec
    | LightConvSpec
    | RecurrentSpec
)

Topology = Literal[
    "pre_norm",
    "mlp_norm",
    "convolved",
    "from_norms",
    "layer_scale",
    "gated_pre_norm",
    "gated_cross",
    "sandwich",
    "scaled_sandwich",
    "scaled_sandwich_with_experts",
    "post_norm",
    "normed_sums",
    "parallel",
    "parallel_two_norms",
    "one_part",
    "shared_latents",
    "shortcut",
    "side_by_side",
    "shared_transformer",
    "hyper_connected",
    "conformer",
    "conformer_sandwich",
    "gated_streams",
    "altup",
]


@dataclass(frozen=True)
class StreamsSpec:
    """Several residual streams, summed before each branch and mixed after it:
    layers/parts/hyper_connection.py.

    `count` is their number, `iterations` those of the Sinkhorn-Knopp algorithm, and 0 for streams that are
    not mixed. `eps` is added to its sums and to the weights of streams, `norm_eps` to the mean square of all
    streams, and `magnitude` is the factor of the weights of a branch's output. Without `weighted_head` the
    model's end is the streams' mean.
    """

    count: int
    iterations: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-6
    magnitude: float = 2.0
    weighted_head: bool = True


@dataclass(frozen=True)
class GatedStreamsSpec:
    """Several residual streams, `count` of them, with gates by channel before each branch, computed through a
    `rank`: layers/parts/gated_streams.py.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class AltUpSpec:
    """Several residual streams; a layer computes one and corrects all (layers/parts/altup.py).

    `count` is their number, and `active` the index of the stream that layers compute. In training the
    matrices of coefficients are clamped to -limit .. limit. With `scaled` the branch of
    per-layer inputs reads the active stream times a learned vector.
    """

    count: int
    active: int
    limit: float
    scaled: bool = True


@dataclass(frozen=True)
class SharedSpec:
    """A layer's use of attention and an MLP whose weights several layers share
    (layers/blocks/shared_transformer.py).

    `first` is the index of the first layer that uses these weights, and `use` the layer's number among all
    layers with shared weights. Each use has adapters of its own, products of two matrices of the given
    `rank`, which are added to the MLP's first projection and with `adapts_attention` to queries, keys and
    values.
    """

    first: int
    use: int
    rank: int
    adapts_attention: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """One layer: its topology (a class of `layers/blocks`) and its parts.

    The types of `mixer` and `mlp` determine their modules; a layer of topology "one_part" has only one of
    them. `second_mixer` reads the same input as `mixer`, and `branch_scales` multiply the outputs of both and
    of the MLP; `stream_scales` multiply the terms to which the mixer's output and the MLP's are added. `norm`
    applies to each of the layer's norms, or with `branch_norm` to those before
    the branches, and that to the norms of their outputs. If it has a gate, the norm before the MLP has none
    with `plain_mlp_norm`. `initial_scale` is the initial value of learned
    scales of the branches. `residual_scale` multiplies each branch before it
    is added to the residual stream, and in training its elements are dropped with the probability `dropout`.
    Some topologies support `experts` in addition to the MLP, and a `per_layer_input`. With `shared`, the
    second mixer and the MLP are shared with other layers. The topologies "hyper_connected",
    "gated_streams" and "altup" have several residual `streams`; the second may add embeddings of `ngrams` to
    them, and the third has a branch of rank `laurel_rank`. In
    a "conformer" and a "conformer_sandwich" `second_mixer` has a branch of its own, and `residual_scale`
    multiplies the branches of both MLPs alone; in the latter inputs of norms are clamped to +-`bound`.
    """

    mixer: MixerSpec | None
    mlp: MLPSpec | MoESpec | None
    norm: NormSpec | LayerNormSpec | GatedNormSpec
    topology: Topology = "pre_norm"
    residual_scale: float = 1.0
    experts: MoESpec | None = None
    per_layer_input: PerLayerInputSpec | None = None
    second_mixer: MixerSpec | None = None
    branch_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    stream_scales: tuple[float, float] = (1.0, 1.0)
    dropout: float = 0.0
    initial_scale: float = 0.1
    branch_norm: NormSpec | LayerNormSpec | None = None
    shared: SharedSpec | None = None
    streams: StreamsSpec | GatedStreamsSpec | AltUpSpec | None = None
    bound: float | None = None
    ngrams: NgramSpec | None = None
    laurel_rank: int | None = None
    plain_mlp_norm: bool = False

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The layer's token mixers: none, one or two."""
        return tuple(mixer for mixer in (self.mixer, self.second_mixer) if mixer is not None)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return tuple(rope for mixer in self.mixers for rope in mixer.ropes)

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer that carries a state; None if there is none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, RecurrentSpec)), None)

    @property
    def carries_state(self) -> bool:
        """Whether some part reads a state of the tokens before: a recurrent mixer, or convolutions."""
        return self.recurrent is not None or isinstance(self.mixer, ConvolvedAttentionSpec)

    @property
    def mixture(self) -> MoESpec | None:
        """The layer's experts, in place of an MLP or in addition to it."""
        return self.mlp if isinstance(self.mlp, MoESpec) else self.experts
