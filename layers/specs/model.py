"""Whole models."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from liger_models.layers.specs.attention import AttentionSpec
from liger_models.layers.specs.audio import AudioSpec
from liger_models.layers.specs.block import AltUpSpec, BlockSpec, GatedStreamsSpec, StreamsSpec
from liger_models.layers.specs.fresh import Fresh
from liger_models.layers.specs.mlp import Activation, MoESpec
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.rotary import RopeSpec
from liger_models.layers.specs.ternary import TernarySpec
from liger_models.layers.specs.vision import TiledVisionSpec, VisionSpec


@dataclass(frozen=True)
class MTPSpec:
    """Multi-token prediction modules after a decoder (layers/model/mtp.py).

    Each of the `blocks` belongs to one module, whose inputs and output pass through a `norm`; the module's
    number is `first` plus its index.
    """

    blocks: tuple[BlockSpec, ...]
    norm: NormSpec | LayerNormSpec
    first: int = 0


@dataclass(frozen=True)
class HeadLayersSpec:
    """Layers of the head before its projection onto the vocabulary: a linear layer, with a bias or without,
    an activation and a norm (layers/parts/head_layers.py).
    """

    norm: NormSpec | LayerNormSpec
    activation: Activation = "gelu"
    bias: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model: embeddings, blocks, a final norm (or None) and a head.

    `embed_scale` multiplies the embeddings of ids; with `round_embed_scale` it is first rounded to their
    dtype (Gemma). `id_norm` is a norm of these embeddings (Muse Glimmer, Inkling); embeddings that a
    caller passes are not normalised. `input_scale` multiplies any input of the first block (Granite).
    `logit_scale` multiplies the logits, and `logit_softcap` bounds them: softcap * tanh(logit / softcap).
    `padding_idx` is the embedding row whose lookup has no gradient, as in the reference, and that is
    initialised with zeros. (A tied head still gives it a gradient.) `per_layer_vocab_size` is the number of
    ids with per-layer embeddings, if there are any; ids beyond have those of id 0. `vision` is the image
    encoder, and `audio` the audio encoder. `extra_ids` ids after the vocabulary have embeddings and are never
    predicted. Nor are those from `predicted_ids` on, for which the head has rows without use. `mtp` are
    modules that predict further tokens.

    `learned_positions` is the number of positions with a learned vector, which is added to the embedding;
    `unused_positions` rows of their table come before them. With `sinusoidal_positions` it is a fixed vector
    for any position but `zero_position`, as if as many positions came before the first (XGLM). Without
    `padding_has_positions` a row's positions count only its tokens (OPT). `embed_norm` is a norm of the first
    block's input, whose elements are dropped in training with the probability `embed_dropout`.

    With `float32_head` logits are computed in float32, whatever the model's dtype (but not under autocast),
    and the head's weight may be wider than other matrices.

    `head_layers` of the head come before its projection onto the vocabulary.

    With `ternary` the linear layers of the blocks multiply rounded operands.

    `fresh` has initial values of parameters that differ from the usual, with patterns of their paths.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec | LayerNormSpec | None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    embed_scale: float = 1.0
    round_embed_scale: bool = True
    input_scale: float = 1.0
    head_bias: bool = False
    float32_head: bool = False
    head_layers: HeadLayersSpec | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    padding_idx: int | None = None
    per_layer_vocab_size: int | None = None
    vision: VisionSpec | TiledVisionSpec | None = None
    audio: AudioSpec | None = None
    extra_ids: int = 0
    predicted_ids: int | None = None
    mtp: MTPSpec | None = None
    learned_positions: int | None = None
    unused_positions: int = 0
    sinusoidal_positions: bool = False
    zero_position: int | None = None
    padding_has_positions: bool = True
    embed_norm: NormSpec | LayerNormSpec | None = None
    embed_dropout: float = 0.0
    id_norm: NormSpec | None = None
    fresh: tuple[tuple[str, Fresh], ...] = ()
    ternary: TernarySpec | None = None

    @property
    def last_norm(self) -> NormSpec | LayerNormSpec:
        """The final norm.

        Raises:
            ValueError: there is none.
        """
        if self.norm is None:
            raise ValueError("the model has no norm after its last layer, which normalises its sums")
        return self.norm

    @property
    def streams(self) -> StreamsSpec | GatedStreamsSpec | AltUpSpec | None:
        """The residual streams between layers; None for one."""
        return self.blocks[-1].streams if self.blocks else None

    @property
    def placeholders(self) -> dict[str, int]:
        """Ids of tokens that stand for "image", "video" and "audio" features, as far as there are any."""
        ids = {kind: getattr(self.vision, f"{kind}_id", None) for kind in ("image", "video")}
        ids["audio"] = None if self.audio is None else self.audio.audio_id
        return {kind: number for kind, number in ids.items() if number is not None}

    @property
    def num_ids(self) -> int:
        """Number of ids with embeddings."""
        return self.vocab_size + self.extra_ids

    def resized(self, size: int) -> ModelSpec:
        """The spec with a vocabulary of `size` ids, and no others.

        Raises:
            ValueError: ids from some number on are never predicted.
        """
        if self.predicted_ids is not None:
            raise ValueError(
                f"only the first {self.predicted_ids} of this model's {self.num_ids} ids are predicted, so "
                f"their number cannot change; found {size}"
            )
        return replace(self, vocab_size=size, extra_ids=0)

    @property
    def num_labels(self) -> int:
        """Number of ids that are predicted."""
        return self.vocab_size if self.predicted_ids is None else self.predicted_ids

    @functools.cached_property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Distinct rotary settings of the layers, in the order of first use."""
        blocks = self.blocks if self.mtp is None else (*self.blocks, *self.mtp.blocks)
        return tuple(dict.fromkeys(rope for block in blocks for rope in block.ropes))

    @property
    def float32_stream(self) -> bool:
        """Whether the residual stream is in float32."""
        return isinstance(self.norm, NormSpec) and self.norm.float32_stream

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer carries a state from token to token."""
        return any(block.carries_state for block in self.blocks)

    @property
    def is_bidirectional(self) -> bool:
        """Whether some layer's tokens attend to later ones, other than within spans."""
        return any(isinstance(m, AttentionSpec) and not m.causal for b in self.blocks for m in b.mixers)

    @property
    def position_limit(self) -> int | None:
        """First position beyond the table of positions or some layer's rotary embedding; None if all are
        unlimited.
        """
        limits = [] if self.learned_positions is None else [self.learned_positions]
        limits += [rope.position_limit for rope in self.ropes if rope.position_limit is not None]
        return min(limits, default=None)

    @property
    def draws_in_training(self) -> bool:
        """Whether a pass in training mode draws random numbers, so that repeated passes differ."""
        mixtures = [b.mixture for b in self.blocks if b.mixture is not None]
        return any(e.sparse_mixer is not None or e.input_noise for e in mixtures) or self.has_dropout

    @property
    def has_dropout(self) -> bool:
        """Whether elements are dropped in training."""
        weights = (getattr(m, "dropout", 0.0) for b in self.blocks for m in b.mixers)
        return self.embed_dropout > 0 or any(b.dropout > 0 for b in self.blocks) or any(weights)

    @property
    def router(self) -> MoESpec | None:
        """The first layer's experts whose router adds to the loss."""
        mixtures = (block.mixture for block in self.blocks)
        return next((spec for spec in mixtures if spec is not None and spec.has_router_loss), None)
