"""What lets tokens see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.rotary import QueryScaleSpec, RopeSpec


@dataclass(frozen=True)
class QKNormSpec:
    """A norm of the queries and one of the keys, before they are turned or after.

    `scope` says what is normalised together, and by which weight: "head", each head by itself and all by one
    weight [head_dim] (Qwen 3, Gemma 3); "own_head", each head by itself with a weight of its own, [heads,
    head_dim] (Cohere); "all_heads", the heads of a token together, by a weight [heads * head_dim] (OLMo 2);
    "unweighted", each head by itself, without a weight (Llama 4).
    With `values` each head of the values is normalised too, without a weight (Gemma 4).
    """

    norm: NormSpec | LayerNormSpec = NormSpec()
    scope: Literal["head", "own_head", "all_heads", "unweighted"] = "head"
    before_rope: bool = True
    values: bool = False


class _Heads:
    """How wide queries, keys and values of all heads are, beside one another."""

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
class AttentionSpec(_Heads):
    """Attention with grouped key/value heads: `causal`, or of all tokens of a document to all others.

    `scale` multiplies the scores. `window` counts the tokens a query sees, itself included (None: all before
    it). With `chunk` documents are cut into pieces of so many tokens, and a query sees its own piece alone.
    `rope` is None for a layer without positions. `softcap` bounds the scores: softcap * tanh(score /
    softcap). With `sinks` each head learns a logit that takes its share of the weights and gives nothing.
    `query_scale` multiplies the queries by their positions, once they are turned.
    With `gated` the query projection also gives each head a gate of `head_dim`, next to its query, whose
    sigmoid multiplies the head's output.
    With `values_are_keys` one projection gives both: what the keys were before their norm and rotation.
    A span of tokens that all see one another (`Visibility.spans`) is cut by a window, but for `whole_spans`.
    Without `sees_spans` none of them sees ahead. `clipped` projections are between stored bounds:
    layers/projections/clipped_linear.py.
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
    sees_spans: bool = True
    clipped: bool = False
    gated: bool = False

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class SharedAttentionSpec(_Heads):
    """Causal attention of queries alone, to the keys and values that the earlier layer `keys_of` has made and
    attended to; their heads, and the window, are those of that layer.

    `bias` is that of both projections, `q_norm` a norm of each head's query before it is turned. The rest is
    as in `AttentionSpec`.
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
    sees_spans: bool = True

    @property
    def attention(self) -> AttentionSpec:
        """The product of the heads, once queries are made."""
        heads = self.num_attention_heads, self.num_key_value_heads
        return AttentionSpec(
            *heads, self.head_dim, self.scale, window=self.window, sees_spans=self.sees_spans
        )

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Causal attention whose keys and values are made from a latent of `kv_lora_rank`, which all heads share,
    and whose queries from one of `q_lora_rank`, or from the hidden state where that is None.

    Of a head's query and key `qk_nope_head_dim` dimensions have no position, and `qk_rope_head_dim`, behind
    them, are turned by `rope` if it is given; those of the keys are one head, common to all. `scale`
    multiplies the scores, and `query_scale` the queries by their positions, once they are turned. `bias` is
    that of the projections to the latents and of the output's. `norm` is that of the latents.
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
    query_scale: QueryScaleSpec | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention(self) -> AttentionSpec:
        """The product of the heads, once queries, keys and values are made."""
        heads = self.num_attention_heads
        return AttentionSpec(heads, heads, self.qk_head_dim, self.scale)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class CrossAttentionSpec(_Heads):
    """Attention of tokens to features of images, with a `norm` of each head of the queries and one of the
    keys (Llama 3.2 Vision): see layers/attention/cross_attention.py.
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
