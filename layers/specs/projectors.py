"""Projectors of image encoders' features into language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec


@dataclass(frozen=True)
class PatchMergerSpec:
    """Projector: `norm`, concatenation of `merge` times `merge` adjacent patches, and two linear layers with
    an exact GELU between them (Qwen2-VL). `norm_merged` normalises the concatenated patches instead of each
    patch. With a `size` the second layer has this width, and one more linear layer follows (HyperCLOVA X).
    """

    merge: int
    norm: NormSpec | LayerNormSpec
    norm_merged: bool = False
    size: int | None = None


@dataclass(frozen=True)
class MistralMergerSpec:
    """Projector: `norm`, one linear layer over `merge` times `merge` adjacent patches, and two more with an
    activation between them (Mistral Small 3.1).
    """

    merge: int
    norm: NormSpec | LayerNormSpec
    activation: Activation = "gelu"
    bias: bool = False


@dataclass(frozen=True)
class LinearProjectorSpec:
    """Projector: the mean of `merge` times `merge` adjacent patches (Gemma 3, PaliGemma), or all of them if
    `concatenated` (Idefics 3), an optional `norm` of a patch, and one linear layer.
    """

    merge: int = 1
    norm: NormSpec | LayerNormSpec | None = None
    bias: bool = False
    concatenated: bool = False


@dataclass(frozen=True)
class EndedProjectorSpec:
    """Projector: one linear layer with a bias, and a learned token after each image (DeepSeek-OCR 2)."""

    merge: ClassVar[int] = 1


@dataclass(frozen=True)
class MLPProjectorSpec:
    """Projector: an optional `patch_norm` of each patch, concatenation of `merge` times `merge` adjacent
    patches, an optional `norm` of these, and two linear layers with an activation between them, of width
    `size` or the language model's (LLaVA, InternVL).
    """

    activation: Activation = "gelu"
    bias: bool = True
    merge: int = 1
    norm: NormSpec | LayerNormSpec | None = None
    size: int | None = None
    patch_norm: NormSpec | LayerNormSpec | None = None


@dataclass(frozen=True)
class AdapterSpec:
    """Projector: concatenation of `merge` times `merge` adjacent patches, two linear layers of width `size`,
    each followed by an exact GELU, one more (Llama 4), and an optional `norm`. If `interleaved`, the patches
    take turns in each channel (Muse Glimmer).
    """

    merge: int
    size: int
    norm: NormSpec | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class PoolProjectorSpec:
    """Projector: the mean of `merge` times `merge` adjacent patches, times the root of their width; if
    `standardized`, minus a bias and times a scale that are stored and not trained; an RMSNorm without a
    weight, and one linear layer (Gemma 4).
    """

    merge: int
    eps: float
    standardized: bool = False


@dataclass(frozen=True)
class DownsamplingProjectorSpec:
    """Projector: one linear layer with a bias over `merge` times `merge` adjacent patches, one without, a
    LayerNorm, an exact GELU, and a gated MLP of intermediate width `size` (GLM-4.1V), whose gates and other
    inputs a `limit` clamps (GLM-5.3-Flash).
    """

    merge: int
    size: int
    activation: Activation = "silu"
    limit: float | None = None


@dataclass(frozen=True)
class GatedProjectorSpec:
    """Projector: concatenation of `merge` times `merge` adjacent patches, an optional `norm` of these, a
    linear layer of width `size`, whose second half passes through a SiLU and multiplies the first, and one
    more linear layer (Aya Vision).
    """

    merge: int
    size: int
    norm: NormSpec | LayerNormSpec | None = None


@dataclass(frozen=True)
class TwiceProjectedSpec:
    """Projector: two linear layers for each patch, then two for each `merge` times `merge` adjacent ones,
    with an exact GELU between the layers of both, all of inner width `size` (MiniMax-M3).
    """

    merge: int
    size: int


@dataclass(frozen=True)
class ResamplerSpec:
    """Projector: two linear layers with an exact GELU between them and `inner_norm` after them, of `merge`
    times `merge` adjacent patches, and again of these at two consecutive time steps, of an image twice the
    same; one more linear layer and `norm` (ERNIE 4.5 VL).
    """

    merge: int
    inner_norm: LayerNormSpec
    norm: NormSpec


@dataclass(frozen=True)
class RowsProjectorSpec:
    """Projector: `norm` of a patch, a convolution of `merge` times `merge` adjacent patches, which doubles
    the width, a linear layer, which doubles it again, with an activation between them, a learned feature
    after each row of an image, one more linear layer, a learned token before and one after the image, and
    `norm` (Hunyuan-VL).
    """

    merge: int
    norm: NormSpec
    activation: Activation = "gelu"


@dataclass(frozen=True)
class VisualWordsSpec:
    """Projector: a linear layer over `merge` times `merge` adjacent patches, a LayerNorm, and a softmax over
    `size` visual words, whose probabilities weight the rows of a table (Ovis, arXiv:2405.20797, section 3.1).
    The table has `markers` more rows: see `VisionSpec.marker_ids`.
    """

    merge: int
    size: int
    markers: int


@dataclass(frozen=True)
class ConvolutionProjectorSpec:
    """Projector for pictures of `side` times `side` patches: a neck, a linear layer and a convolution of 3
    times 3 patches to `channels`, each with a LayerNorm, two convolutions of stride 2, and one linear layer
    (GOT-OCR 2.0).
    """

    side: int
    channels: int

    @property
    def merge(self) -> int:
        """The number of patches on a side of what makes a token."""
        return 4


@dataclass(frozen=True)
class StridedProjectorSpec:
    """Projector: two convolutions of 3 times 3 patches with stride 2, which double the width, and one linear
    layer, with or without a bias (Step 3.7).
    """

    bias: bool = False

    @property
    def merge(self) -> int:
        """The number of patches on a side of what makes a token."""
        return 4


@dataclass(frozen=True)
class PoolingAttentionSpec:
    """Projector: for each token a few patches, whose mean is the input of a query that attends to them, in
    heads of `head_dim` and to width `size`; then a gated MLP of intermediate width `intermediate_size`
    (Molmo 2). `bias` is of the attention's projections, `mlp_bias` of the MLP's first ones.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    size: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = True
    mlp_bias: bool = False

    @property
    def merge(self) -> int:
        """Patches are in raster order; the processor says which of them make a token."""
        return 1


@dataclass(frozen=True)
class QueryProjectorSpec:
    """Projector: the first of `queries` learned vectors, as many as a picture has tokens, attend to its
    patches in `num_attention_heads` heads, and pass through an MLP of inner width `size` (Aria).
    """

    queries: int
    num_attention_heads: int
    size: int

    @property
    def merge(self) -> int:
        """Patches are in raster order."""
        return 1


@dataclass(frozen=True)
class FrameQueriesSpec:
    """Projector: in windows of `window` frames of sound a Q-Former of `depth` layers (arXiv:2301.12597,
    section 3.1) of width `width`, whose `queries` queries are learned vectors, and a linear layer (Granite
    Speech). Layers have norms after their sums and MLPs of inner width `size`; every `frequency`th one
    attends to frames.
    """

    window: int
    queries: int
    width: int
    num_attention_heads: int
    size: int
    norm: LayerNormSpec
    depth: int = 1
    frequency: int = 1
    activation: Activation = "gelu"
    merge: ClassVar[int] = 1


@dataclass(frozen=True)
class WindowQueriesSpec:
    """Projectors for several layers of the language model, each of the features before layer `layers[i]`,
    made of the encoder's state `states[i]`, counted among those taken: a norm, and in windows of `window`
    times `window` patches of pictures of `side` times `side` a Q-Former of `depth` layers (arXiv:2301.12597,
    section 3.1), whose `queries` times `queries` queries are learned vectors plus means of patches, or in the
    last `corners` projectors one corner of four patches each; then a linear layer (Granite 4 Vision). Layers
    have norms after their sums and MLPs of inner width `size`; every `frequency`th one attends to patches.
    """

    side: int
    window: int
    queries: int
    layers: tuple[int, ...]
    states: tuple[int, ...]
    corners: int
    num_attention_heads: int
    size: int
    norm: LayerNormSpec
    depth: int = 1
    frequency: int = 1
    activation: Activation = "gelu"

    @property
    def merge(self) -> int:
        """Patches are in raster order."""
        return 1

    @property
    def token_side(self) -> int:
        """The number of features on a side of a picture."""
        return self.side // self.window * self.queries


@dataclass(frozen=True)
class PerceiverSpec:
    """Projector: a gated MLP of inner width `size` to the language model's width, in which `latents` learned
    vectors then attend to the patches and to one another in `depth` layers (Idefics 2). A layer has
    pre-norms, of latents and patches apart, attention in heads of `head_dim` and a gated MLP of
    `inner_size`; a `norm` follows the last.
    """

    size: int
    latents: int
    depth: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    inner_size: int
    norm: NormSpec
    activation: Activation = "silu"
    patch_activation: Activation = "silu"

    @property
    def merge(self) -> int:
        """Patches are in raster order."""
        return 1


@dataclass(frozen=True)
class TileRowsSpec:
    """Projector: means of two times two patches, a learned vector after each row of these and one between an
    image's tiles and the whole, and two linear layers with biases and an exact GELU between them
    (Phi-4-multimodal).
    """

    merge: ClassVar[int] = 1  # patches are in raster order, those of a token numbered


@dataclass(frozen=True)
class TwoWaysSpec:
    """Projector: two linear layers with biases and an exact GELU between them; and two others, for sounds
    next to images (Phi-4-multimodal).
    """

    merge: ClassVar[int] = 1


@dataclass(frozen=True)
class EmbedderSpec:
    """Projector: an RMSNorm with `eps`, one linear layer, and an RMSNorm without a weight (Gemma 3n). It also
    embeds the `ids` token ids from `first_id` on: rows of its own table, with another first norm, in place of
    those of the language model's table. The row `padding_row` fills up features.
    """

    first_id: int
    ids: int
    eps: float
    padding_row: int | None = None
    merge: ClassVar[int] = 1


ProjectorSpec = (
    QueryProjectorSpec
    | WindowQueriesSpec
    | FrameQueriesSpec
    | PerceiverSpec
    | PoolingAttentionSpec
    | PoolProjectorSpec
    | ConvolutionProjectorSpec
    | StridedProjectorSpec
    | ResamplerSpec
    | RowsProjectorSpec
    | VisualWordsSpec
    | GatedProjectorSpec
    | TwiceProjectedSpec
    | DownsamplingProjectorSpec
    | AdapterSpec
    | PatchMergerSpec
    | MistralMergerSpec
    | LinearProjectorSpec
    | EndedProjectorSpec
    | MLPProjectorSpec
    | TileRowsSpec
    | TwoWaysSpec
    | EmbedderSpec
)
