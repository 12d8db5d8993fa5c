"""Attention mixers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.indexers import (
    BlockIndexerSpec,
    GatedPoolsSpec,
    IndexerSpec,
    PooledIndexerSpec,
)
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.rotary import QueryScaleSpec, RopeSpec


@dataclass(frozen=True)
class QKNormSpec:
    """Norms of queries and keys, before or after their rotation.

    `scope` defines the normalised group and its weight: "head", each head with one shared weight [head_dim]
    (Qwen 3, Gemma 3); "own_head", each head with its own weight, [heads, head_dim] (Cohere); "all_heads", a
    token's heads together, with a weight [heads * head_dim] (OLMo 2); "unweighted", each head without a
    weight (Llama 4). `values` also normalises each head of the values, without a weight (Gemma 4).
    """

    norm: NormSpec | LayerNormSpec = NormSpec()
    scope: Literal["head", "own_head", "all_heads", "unweighted"] = "head"
    before_rope: bool = True
    values: bool = False


class Heads:
    """Widths of queries, keys and values over all heads."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class AttentionSpec(Heads):
    """Attention with grouped key/value heads: `causal`, or bidirectional within documents.

    `scale` multiplies the scores. `window` is the number of visible tokens, the query's own included (None:
    all preceding); without causality as many after it are visible. `chunk` splits documents into pieces of
    that many tokens, and a query attends only to its own piece. `rope` is None for a layer without positions.
    Without `k_bias` only queries and values have the bias of `qkv_bias` (Whisper).
    `softcap` bounds the scores: softcap * tanh(score / softcap). With `sinks` each head learns a logit that
    takes a share of the weights and contributes no value. `slopes` are one number per head, times which the
    distance is subtracted from a score (ALiBi). In training weights are dropped with the probability
    `dropout`. `query_scale` scales the queries by position after their
    rotation. With `gated` the query projection also computes a gate of `head_dim` per head, next to its
    query, whose sigmoid multiplies the head's output; with `gates` a projection of its own computes it, by
    channel or one number by head, with `gate_bias` after adding a learned number of each head, and with
    `softplus_gates` the softplus multiplies the output instead.
    `qkv_limit` clamps queries, keys and values as they leave their projection. Heads of values have
    `v_head_dim` elements, or if it is None as many as those of keys. With `values_are_keys` one projection
    computes both: values are the keys before norm and rotation. Within spans (`Visibility.spans`)
    all tokens attend to each other, limited by the window unless `whole_spans` is set. Without
    `bidirectional_spans` spans are ignored. `clipped` projections clamp to stored bounds:
    layers/projections/clipped_linear.py. With an `indexer` the heads of a group attend to the blocks of keys
    that it chooses. `out_norm` is a norm of the output of all heads together, before its projection.
    `out_bias` is added after it, and no part of the projection, which has none.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    qk_norm: QKNormSpec | None = None
    query_scale: QueryScaleSpec | None = None
    values_are_keys: bool = False
    chunk: int | None = None
    causal: bool = True
    whole_spans: bool = False
    bidirectional_spans: bool = True
    clipped: bool = False
    gated: bool = False
    gates: Literal["channels", "heads"] | None = None
    softplus_gates: bool = False
    qkv_limit: float | None = None
    slopes: tuple[float, ...] | None = None
    dropout: float = 0.0
    v_head_dim: int | None = None
    indexer: BlockIndexerSpec | PooledIndexerSpec | None = None
    k_bias: bool = True
    out_norm: NormSpec | None = None
    gate_bias: bool = False
    out_bias: bool = False

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the weights are a softmax of the scaled scores, and nothing else."""
        return self.softcap is None and not self.sinks and self.slopes is None

    @property
    def value_dim(self) -> int:
        """Width of a head of the values, and of the output."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def v_size(self) -> int:
        """Width of the values over all heads."""
        return self.num_key_value_heads * self.value_dim

    @property
    def o_size(self) -> int:
        """Width of the output over all heads, before its projection."""
        return self.num_attention_heads * self.value_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)

    @property
    def gate_size(self) -> int:
        """Width of the gate, over all heads; 0 without one."""
        by_head = self.gates == "heads"
        return (self.num_attention_heads if by_head else self.o_size) if self.gated or self.gates else 0


@dataclass(frozen=True)
class SharedAttentionSpec(Heads):
    """Causal attention with only queries of its own, to the keys and values of the earlier layer `keys_of`,
    which also defines their heads and the window.

    `bias` applies to both projections; `q_norm` is a norm of each head's query before its rotation. The rest
    is as in `AttentionSpec`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    keys_of: int
    rope: RopeSpec | None = None
    window: int | None = None
    bias: bool = False
    q_norm: NormSpec | LayerNormSpec | None = None
    bidirectional_spans: bool = True

    @property
    def attention(self) -> AttentionSpec:
        """The attention product, after the queries are computed."""
        heads = self.num_attention_heads, self.num_key_value_heads
        return AttentionSpec(
            *heads,
            self.head_dim,
            self.scale,
            window=self.window,
            bidirectional_spans=self.bidirectional_spans,
        )

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal attention with keys and values computed from a latent of `kv_lora_rank`, shared by all heads,
    and queries from a latent of `q_lora_rank`, or from the hidden state if that is None.

    A head's query and key have `qk_nope_head_dim` dimensions without position, then `qk_rope_head_dim`
    rotated by `rope` if given; the rotated part of keys is one head shared by all. `scale` multiplies the
    scores, and `query_scale` scales the queries by position after their rotation. `bias` applies to the
    latent and the output projections. `norm` is the latents', and `latent_scale` multiplies the normed latent
    of keys and values. With `gates` a further projection computes a gate, by channel or one number by head,
    whose sigmoid multiplies the output; with `gated` that of queries also computes a gate of `v_head_dim`
    per head, next to its query. With `raw_q_latent` queries come from their latent after and before its norm,
    side by side. With `k_rope_norm` the rotated part of keys is normalised before, as the latents are.
    `window` is the number of visible tokens, as in `AttentionSpec`. With `sinks` each head learns a logit
    that takes a share of the weights and contributes no value. With an `indexer` a query attends to the keys
    that it chooses, from the hidden state and the queries' latent, if they have one; with `keys_of`, to those
    that the indexer of that layer has chosen. With `learned_query_scale` the layer's queries and its
    indexer's are also multiplied by a learned linear function of the logarithm of their position, by head.
    With `latents_of` the layer computes no latent of keys and values, and no rotated part of keys: it reads
    those of that earlier layer.
    """

    num_attention_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    scale: float
    q_lora_rank: int | None = None
    rope: RopeSpec | None = None
    bias: bool = False
    norm: NormSpec = NormSpec(eps=1e-6)
    latent_scale: float = 1.0
    query_scale: QueryScaleSpec | None = None
    gates: Literal["channels", "heads"] | None = None
    sinks: bool = False
    indexer: IndexerSpec | GatedPoolsSpec | None = None
    keys_of: int | None = None
    learned_query_scale: bool = False
    latents_of: int | None = None
    gated: bool = False
    raw_q_latent: bool = False
    k_rope_norm: bool = False
    window: int | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention(self) -> AttentionSpec:
        """The attention product, after queries, keys and values are computed."""
        heads = self.num_attention_heads
        sizes = heads, heads, self.qk_head_dim
        return AttentionSpec(*sizes, self.scale, window=self.window, sinks=self.sinks)

    @property
    def gate_size(self) -> int:
        """Width of the gate, over all heads; 0 without one."""
        if self.gates is None and not self.gated:
            return 0
        return self.num_attention_heads * (1 if self.gates == "heads" else self.v_head_dim)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class CompressorSpec:
    """Compressed keys, each a weighted mean of `rate` tokens, and with `overlapping` also of the `rate`
    tokens before these: layers/attention/compressed/compressor.py. With an `indexer` a query attends to only
    those that it chooses.
    """

    rate: int
    overlapping: bool = False
    indexer: IndexerSpec | None = None


@dataclass(frozen=True)
class CompressedAttentionSpec:
    """Causal attention with one head of keys, which are also the values, to a `window` of tokens and to
    compressed keys: layers/attention/compressed/attention.py.

    Queries come from a latent of `q_lora_rank`. The last dimensions of queries and keys are rotated by
    `rope`, and those of the output are rotated back. Each head learns a sink. The heads form `o_groups`
    groups of equal size, whose outputs are projected to `o_lora_rank` each before the last projection. `norm`
    is that of the latent and of keys, and its epsilon that of queries.
    """

    num_attention_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    norm: NormSpec = NormSpec()
    compressor: CompressorSpec | None = None

    @property
    def q_size(self) -> int:
        """Width of the queries, and of the output before its projections, over all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def indexer(self) -> IndexerSpec | None:
        """The indexer of compressed keys."""
        return None if self.compressor is None else self.compressor.indexer

    @property
    def attention(self) -> AttentionSpec:
        """The attention product, after queries and keys are computed."""
        heads = self.num_attention_heads, 1
        return AttentionSpec(*heads, self.head_dim, self.scale, window=self.window, sinks=True)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return (self.rope,)


@dataclass(frozen=True)
class GridAttentionSpec(Heads):
    """Attention of the patches of pictures of `side` times `side` patches, in blocks of `merge` times
    `merge`, with learned relative positions: layers/grids/grid_attention.py. With a `window`, patches attend
    within windows of so many times so many.
    """

    num_attention_heads: int
    head_dim: int
    scale: float
    side: int
    merge: int
    window: int | None = None
    qkv_bias: bool = True

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()

    @property
    def width(self) -> int:
        """The number of patches on a side of what attends to one another."""
        return self.side if self.window is None else self.window


@dataclass(frozen=True)
class GridConvSpec:
    """A gated depthwise convolution of `width` times `width` patches of pictures:
    layers/grids/grid_conv.py.
    """

    width: int = 3

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads: none."""
        return ()


@dataclass(frozen=True)
class DifferentialAttentionSpec:
    """The difference of two causal attentions to the same values, by head, with a norm of each head:
    layers/attention/differential.py. Both numbers of heads are even; `norm_eps` is that of the norm, and
    `bias` applies to all projections.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    lambda_init: float
    norm_eps: float = 1e-5
    bias: bool = False

    @property
    def v_head_dim(self) -> int:
        """Width of a pair of values, which both attentions share."""
        return 2 * self.head_dim

    @property
    def attention(self) -> AttentionSpec:
        """The product of both attentions in one call."""
        heads = self.num_attention_heads, self.num_key_value_heads
        return AttentionSpec(*heads, self.head_dim, self.scale, v_head_dim=self.v_head_dim)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Rotary settings whose tables the layer reads."""
        return (self.rope,)


@dataclass(frozen=True)
class CrossAttentionSpec(Heads):
    """Attention of tokens to image features, with norms of each head of queries and keys (Llama 3.2 Vision):
    see layers/attention/cross_attention.py.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    norm: NormSpec

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """No positions."""
        return ()
