"""What a model is made of, as data: small frozen dataclasses that a family fills in and the layers read.

Specs say sizes and settings, never wiring: how the parts are connected is the `forward` of a block. One
`BlockSpec` a layer, so that a pattern over layers (a sliding window on some, full attention on others) is a
tuple and not a flag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from liger_models.kernels import ClampedSwiGLU as ClampedSwiGLU

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
NormCast = Literal["llama", "gemma", "float32"]
Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu2", "xielu"]
Topology = Literal[
    "pre_norm",
    "layer_scale",
    "gated_pre_norm",
    "gated_cross",
    "sandwich",
    "scaled_sandwich",
    "scaled_sandwich_with_experts",
    "post_norm",
    "parallel",
]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and how it is stretched to longer
    contexts.

    `dim` is the number of rotated dimensions of a head (the rest pass unrotated); `interleaved` pairs the
    dimensions (2i, 2i+1) instead of (i, i + dim/2). Of these pairs only the first `turning` turn (None: all).
    Where positions have several axes, `axes` says by which of them each pair turns, and `frequencies` with
    the frequency of which pair, where that is not its own. With `halves` each half of a head turns by itself,
    the first by the first half of the pairs, which lie in it as in a whole head (Gemma 4's encoder). The
    fields after `max_position_embeddings` belong to the rope types that name them in `layers/rotary.py`; they
    are None where a type does not use them.
    """

    dim: int
    theta: float = 10_000.0
    type: RopeType = "default"
    interleaved: bool = False
    turning: int | None = None
    axes: tuple[int, ...] | None = None
    frequencies: tuple[int, ...] | None = None
    halves: bool = False
    max_position_embeddings: int | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the longest position of a batch."""
        return self.type in ("dynamic", "longrope")

    @property
    def position_limit(self) -> int | None:
        """The first position that the rotation was not made for; None where it stretches without end."""
        return None if self.type == "dynamic" else self.max_position_embeddings


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm: `x / rms(x) * (offset + weight)`; `cast` says where the result is rounded (see
    kernels/norms/rms_norm.py).
    """

    eps: float = 1e-6
    offset: float = 0.0
    cast: NormCast = "llama"


@dataclass(frozen=True)
class LayerNormSpec:
    """LayerNorm: `(x - mean(x)) / std(x) * (offset + weight) + bias`, with or without a bias."""

    eps: float = 1e-5
    bias: bool = True
    offset: float = 0.0


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


@dataclass(frozen=True)
class QueryScaleSpec:
    """A factor of the queries that grows with their position (Llama 4, Ministral 3), so that the weights keep
    their sharpness over more keys: 1 + beta * log(1 + floor((first + position) / length)). `first` is what
    the first position counts as.
    """

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped key/value heads: `causal`, or of all tokens of a document to all others.

    `scale` multiplies the scores. `window` counts the tokens a query sees, itself included (None: all before
    it). With `chunk` documents are cut into pieces of so many tokens, and a query sees its own piece alone.
    `rope` is None for a layer without positions. `softcap` bounds the scores: softcap * tanh(score /
    softcap). With `sinks` each head learns a logit that takes its share of the weights and gives nothing.
    `query_scale` multiplies the queries by their positions, once they are turned.
    With `values_are_keys` one projection gives both: what the keys were before their norm and rotation.
    A span of tokens that all see one another (`Sequences.spans`) is cut by a window, but for `whole_spans`.
    Without `sees_spans` none of them sees ahead.
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

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary settings whose tables the layer reads."""
        return () if self.rope is None else (self.rope,)


@dataclass(frozen=True)
class SharedAttentionSpec:
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
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

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
class CrossAttentionSpec:
    """Attention of tokens to features of images, with a `norm` of each head of the queries and one of the
    keys (Llama 3.2 Vision): see layers/cross_attention.py.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    norm: NormSpec

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """No positions."""
        return ()


@dataclass(frozen=True)
class MLPSpec:
    """MLP: gated, `down(act(gate(x)) * up(x))`, or not, `down(act(up(x)))`."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True)
class SparseMixerSpec:
    """A choice of two experts that is drawn at random in training, with an estimate of its gradient
    (SparseMixer-v2, arXiv:2409.12136; layers/sparse_mixer.py has the formulas).

    An expert can be drawn if its logit is below the largest by `2 * jitter` of it at most. `input_noise`: in
    training what router and experts read is multiplied by random numbers from 1 - input_noise to
    1 + input_noise.
    """

    jitter: float
    input_noise: float = 0.0


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: each token goes to `experts_per_token` of `num_experts` gated MLPs.

    `bias` is that of the experts' projections, `router_bias` that of the router's logits. `score` to
    `routed_scaling_factor` say how experts are chosen and weighed, as the options of `route` in
    kernels/experts/moe_routing.py; `sparse_mixer` stands in the place of all of them. `weighted` is what the
    weights multiply, the experts' outputs or their inputs. `float32_router` computes the router's logits in
    float32, whatever the model's dtype. With `router_norm_eps` the router reads its input normalised
    (RMSNorm), times a vector that is learned, over the root of its width; with `expert_scale` each expert's
    weights are multiplied by a number that is learned, in the end. `shared_expert` is one more MLP that every
    token goes through; `shared_gate` weighs its output by sigmoid(gate(x)). The coefficients are those of the
    load balancing loss and of the router's z-loss: see layers/router_loss.py.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation | ClampedSwiGLU = "silu"
    bias: bool = False
    router_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_top_k: bool = False
    renormalize: bool = True
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top_2", "max"] = "top_2"
    routed_scaling_factor: float = 1.0
    sparse_mixer: SparseMixerSpec | None = None
    weighted: Literal["outputs", "inputs"] = "outputs"
    float32_router: bool = False
    router_norm_eps: float | None = None
    expert_scale: bool = False
    shared_expert: MLPSpec | None = None
    shared_gate: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    @property
    def has_router_loss(self) -> bool:
        return self.aux_loss_coef != 0 or self.z_loss_coef != 0


@dataclass(frozen=True)
class PerLayerInputSpec:
    """A branch that lets in what a layer has of each token for itself, of `size` elements: see
    layers/per_layer_input.py.
    """

    size: int
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True)
class BlockSpec:
    """One layer: its topology (a class of `layers/blocks.py`) and its parts.

    `mixer` lets tokens see each other; which module it is follows from the spec's type, as with `mlp`. `norm`
    is that of each of the layer's norms. `residual_scale` multiplies what each branch adds to the residual
    stream. Some topologies have room for `experts` beside the MLP, and for a `per_layer_input`.
    """

    mixer: AttentionSpec | SharedAttentionSpec | LatentAttentionSpec | CrossAttentionSpec
    mlp: MLPSpec | MoESpec
    norm: NormSpec | LayerNormSpec
    topology: Topology = "pre_norm"
    residual_scale: float = 1.0
    experts: MoESpec | None = None
    per_layer_input: PerLayerInputSpec | None = None

    @property
    def mixture(self) -> MoESpec | None:
        """The layer's experts, in place of an MLP or beside it."""
        return self.mlp if isinstance(self.mlp, MoESpec) else self.experts


@dataclass(frozen=True)
class PatchSpec:
    """How pictures become tokens: cut into patches of `size` times `size` pixels and `frames` pictures in a
    row, each of which goes through one linear layer as a vector, [channel, frame, row, column].
    """

    size: int
    frames: int = 1
    channels: int = 3
    bias: bool = False

    @property
    def width(self) -> int:
        return self.channels * self.frames * self.size**2


@dataclass(frozen=True)
class PatchMergerSpec:
    """From the encoder to the language model by `norm`, `merge` times `merge` neighbouring patches side by
    side, and two linear layers with an exact GELU between them (Qwen2-VL). `norm_merged`: the norm is of the
    patches side by side, and not of each.
    """

    merge: int
    norm: NormSpec | LayerNormSpec
    norm_merged: bool = False


@dataclass(frozen=True)
class MistralMergerSpec:
    """From the encoder to the language model by `norm`, one linear layer over `merge` times `merge`
    neighbouring patches, and two more with an activation between them (Mistral Small 3.1).
    """

    merge: int
    norm: NormSpec | LayerNormSpec
    activation: Activation = "gelu"
    bias: bool = False


@dataclass(frozen=True)
class LinearProjectorSpec:
    """From the encoder to the language model by the mean of `merge` times `merge` neighbouring patches, a
    `norm` if there is one, and one linear layer (Gemma 3, PaliGemma).
    """

    merge: int = 1
    norm: NormSpec | LayerNormSpec | None = None
    bias: bool = False


@dataclass(frozen=True)
class MLPProjectorSpec:
    """From the encoder to the language model by `merge` times `merge` neighbouring patches side by side, a
    `norm` of them if there is one, and two linear layers with an activation between them, the first to the
    width of the language model already (LLaVA, InternVL).
    """

    activation: Activation = "gelu"
    bias: bool = True
    merge: int = 1
    norm: NormSpec | LayerNormSpec | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """From the encoder to the language model by `merge` times `merge` neighbouring patches side by side, two
    linear layers of width `size`, each with an exact GELU behind it, and one more (Llama 4).
    """

    merge: int
    size: int


@dataclass(frozen=True)
class PoolProjectorSpec:
    """From the encoder to the language model by the mean of `merge` times `merge` neighbouring patches, times
    the root of their width, less a bias and times a scale that are stored and not trained if `standardized`,
    an RMSNorm without a weight, and one linear layer (Gemma 4).
    """

    merge: int
    eps: float
    standardized: bool = False


ProjectorSpec = (
    PoolProjectorSpec
    | AdapterSpec
    | PatchMergerSpec
    | MistralMergerSpec
    | LinearProjectorSpec
    | MLPProjectorSpec
)


@dataclass(frozen=True)
class StretchedTable:
    """A table of `side` times `side` positions, stretched to the size of each picture (Qwen3-VL)."""

    side: int


@dataclass(frozen=True)
class FixedTable:
    """A table of `side` times `side` positions, one for each patch, and one for the class token (CLIP)."""

    side: int


@dataclass(frozen=True)
class AxesTable:
    """Two tables of `size` positions, by whose sum a patch stands in its column and in its row (Gemma 4)."""

    size: int


@dataclass(frozen=True)
class PlacedPictures:
    """A processor gives `pixel_values` [images, patches, width], numbers from 0 to 1 whose channels come
    last, filled up to the most patches, and `image_position_ids` [images, patches, 2], the column and the row
    of each, -1 where there is none; of the steps of videos `pixel_values_videos` and `video_position_ids`,
    with `num_frames_per_video` (Gemma 4).
    """


@dataclass(frozen=True)
class GridPictures:
    """A processor gives patches, [patches of all pictures, width] pixels, and the grid of each picture
    (Qwen2-VL): `pixel_values` with `image_grid_thw`, and of videos `pixel_values_videos` with
    `video_grid_thw`.
    """


@dataclass(frozen=True)
class PaddedPictures:
    """A processor gives `pixel_values` [images, channels, height, width], padded to the largest image, and
    `image_sizes` [images, 2] (Pixtral).
    """


@dataclass(frozen=True)
class SquarePictures:
    """A processor gives `pixel_values` [images, channels, size, size], whatever the images' own size (CLIP).
    What is left over of `size` pixels behind whole patches is not looked at.
    """

    size: int


@dataclass(frozen=True)
class AnyresPictures:
    """A processor gives `pixel_values` [images, tiles, channels, size, size], of each image the whole, and
    behind that, of the one image of a row, tiles of it in the best of `resolutions`, (height, width) in
    pixels; with `image_sizes` [images, 2] and `batch_num_images` [rows]. Of videos it gives
    `pixel_values_videos` [videos, frames, channels, size, size]. How features become tokens, those of `most`
    tiles at the most, is in layers/vision/anyres.py (LLaVA-OneVision).
    """

    size: int
    resolutions: tuple[tuple[int, int], ...]
    most: int


@dataclass(frozen=True)
class TimeSpec:
    """The positions of images' tokens on three axes, time, row and column (M-RoPE, arXiv:2409.12191, section
    2.1): see layers/vision/positions.py. A second of a video is `tokens_per_second` positions long; None:
    each of its time steps is one. `steps_apart`: text stands between the steps of a video, so that each is a
    picture by itself (Qwen3-VL).
    """

    tokens_per_second: float | None = None
    steps_apart: bool = False


@dataclass(frozen=True)
class VisionSpec:
    """An encoder of images and its way into a language model.

    `blocks` are those of the encoder, of width `hidden_size`. Each sees a whole picture (or a time step of a
    video), but for those at `windowed`, which see windows of `window` times `window` merged patches.
    `projector` makes features of what the encoder gives, one for each token with the id `image_id` or
    `video_id`. `positions` are those of these tokens; None: as all others. A `position_table` says where in
    its picture a patch stands, beside rotary positions or not. What layers of the encoder at `deep` give is
    added to its tokens behind the first layers of the language model, the lowest first, each by a projector
    of its own (DeepStack, arXiv:2406.04334). `pictures` is what the family's processor gives, `norm_before` a
    norm in front of the blocks and `norm_behind` one behind them. A `class_token` is one more token of each
    picture, in front of its patches or behind them, which the projector does not get. At `taken` it gets, in
    place of what the last block gives, what these do side by side, the first of them being 1, and 0 what
    enters it. Rotary positions of patches are counted from 1 where a class token stands at 0.

    `kinds` is the keyword by which a processor says of each token what it belongs to; images need it then.
    `spans` are tokens of the language model that all see one another: those of an image ("images"), or what
    stands at the beginning of a document and is of kind 0 ("prefix").
    """

    hidden_size: int
    patches: PatchSpec
    blocks: tuple[BlockSpec, ...]
    projector: ProjectorSpec
    image_id: int
    video_id: int | None = None
    positions: TimeSpec | None = None
    windowed: tuple[int, ...] = ()
    window: int | None = None
    position_table: StretchedTable | FixedTable | AxesTable | None = None
    deep: tuple[int, ...] = ()
    pictures: PlacedPictures | GridPictures | PaddedPictures | SquarePictures | AnyresPictures = (
        GridPictures()
    )
    norm_before: NormSpec | LayerNormSpec | None = None
    norm_behind: NormSpec | LayerNormSpec | None = None
    class_token: Literal["first", "last"] | None = None
    taken: tuple[int, ...] = ()
    kinds: Literal["mm_token_type_ids", "token_type_ids"] | None = None
    spans: Literal["images", "prefix"] | None = None

    @property
    def deep_projector(self) -> PatchMergerSpec:
        """From the layers at `deep`: patches are normalised side by side.

        Raises:
            ValueError: the projector cannot do that.
        """
        if not isinstance(self.projector, PatchMergerSpec):
            raise ValueError(
                f"no projector of lower layers is known beside a {type(self.projector).__name__}"
            )
        return replace(self.projector, norm_merged=True)


@dataclass(frozen=True)
class TiledVisionSpec:
    """An encoder of images that are cut into `tiles` square ones of `image_size` pixels at most, lying in one
    of `ratios` ways (Llama 3.2 Vision): see layers/vision/tiled.py.

    `blocks` come first, then `global_blocks`; `norm` is that in front of all and that between them. Features
    are what the last gives beside what those of `blocks` at `taken` give. The token `image_id` names an image
    in the text.
    """

    hidden_size: int
    patches: PatchSpec
    blocks: tuple[BlockSpec, ...]
    global_blocks: tuple[BlockSpec, ...]
    image_size: int
    tiles: int
    ratios: int
    taken: tuple[int, ...]
    norm: LayerNormSpec
    image_id: int

    @property
    def width(self) -> int:
        """That of features."""
        return self.hidden_size * (1 + len(self.taken))


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model: embeddings, blocks, a final norm and a head.

    `embed_scale` multiplies the embeddings of ids, after it was rounded to their dtype (Gemma); `input_scale`
    whatever enters the first block, as it is (Granite). `logit_scale` multiplies the logits, and
    `logit_softcap` bounds them: softcap * tanh(logit / softcap). `padding_idx` is the row of the embedding
    whose lookup has no gradient, as in the reference, and that starts as zeros. (A tied head still gives it a
    gradient.) `per_layer_vocab_size` is the number of ids that layers have inputs of their own for, if they
    have such. `vision` is what a model has that sees images. `extra_ids` ids beyond the vocabulary have
    embeddings, and are never predicted.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec | LayerNormSpec
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    embed_scale: float = 1.0
    input_scale: float = 1.0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    padding_idx: int | None = None
    per_layer_vocab_size: int | None = None
    vision: VisionSpec | TiledVisionSpec | None = None
    extra_ids: int = 0

    @property
    def num_ids(self) -> int:
        """How many ids have embeddings."""
        return self.vocab_size + self.extra_ids

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct rotary settings of the layers, in the order of first use."""
        return tuple(dict.fromkeys(rope for block in self.blocks for rope in block.mixer.ropes))

    @property
    def position_limit(self) -> int | None:
        """The first position that some layer's rotation was not made for; None where all stretch on."""
        limits = [rope.position_limit for rope in self.ropes if rope.position_limit is not None]
        return min(limits, default=None)

    @property
    def draws_in_training(self) -> bool:
        """Whether a pass in training mode draws random numbers, so that two of them differ."""
        return any(isinstance(b.mlp, MoESpec) and b.mlp.sparse_mixer is not None for b in self.blocks)

    @property
    def router(self) -> MoESpec | None:
        """The experts whose routers add to the loss: those of the first layer that has such."""
        mixtures = (block.mixture for block in self.blocks)
        return next((spec for spec in mixtures if spec is not None and spec.has_router_loss), None)
