"""How a model sees: pictures, the encoder of their patches, and its way into the language model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from liger_models.layers.specs.block import BlockSpec
from liger_models.layers.specs.mlp import Activation
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec


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
class CubicTable:
    """As `FixedTable`, where pictures have `side` times `side` patches; for other squares the rows of patches
    are stretched by cubic interpolation (InternVL).
    """

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
    What is left over of `size` pixels behind whole patches is not looked at. Beside a `CubicTable` all images
    of a call may have another size.
    """

    size: int


@dataclass(frozen=True)
class AnyresPictures:
    """A processor gives `pixel_values` [images, tiles, channels, size, size], of each image the whole, and
    behind that, of the one image of a row, tiles of it in the best of `resolutions`, (height, width) in
    pixels; with `image_sizes` [images, 2] and `batch_num_images` [rows]. Of videos it gives
    `pixel_values_videos` [videos, frames, channels, size, size]; those of several lengths stand behind one
    another, [frames, channels, size, size], with `num_frames_per_video` [videos]. How features become tokens,
    those of `most` tiles at the most, is in layers/vision/anyres.py (LLaVA-OneVision).
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
    picture, in front of its patches or behind them, which the projector gets only with `class_feature`, as
    one more feature of each picture. At `taken` it gets, in place of what the last block gives, what these do
    side by side, the first of them being 1, and 0 what enters it. Rotary positions of patches are counted
    from 1 where a class token stands at 0.

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
    position_table: StretchedTable | FixedTable | CubicTable | AxesTable | None = None
    deep: tuple[int, ...] = ()
    pictures: PlacedPictures | GridPictures | PaddedPictures | SquarePictures | AnyresPictures = (
        GridPictures()
    )
    norm_before: NormSpec | LayerNormSpec | None = None
    norm_behind: NormSpec | LayerNormSpec | None = None
    class_token: Literal["first", "last"] | None = None
    class_feature: bool = False
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
