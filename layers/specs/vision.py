"""Vision-language models: processor outputs and patch encoders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from liger_models.layers.specs.block import BlockSpec
from liger_models.layers.specs.mergers import QueryEncoderSpec, WindowMergerSpec
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec
from liger_models.layers.specs.positions import CanvasSpec, PlaceSpec, TimeSpec
from liger_models.layers.specs.projectors import (
    PatchMergerSpec,
    ProjectorSpec,
    ResamplerSpec,
    RowsProjectorSpec,
    WindowQueriesSpec,
)
from liger_models.layers.specs.pyramid import PyramidSpec
from liger_models.layers.specs.tables import (
    AntialiasedTable,
    AxesTable,
    BicubicTable,
    BilinearTable,
    ClipTable,
    CroppedTable,
    CubicTable,
    FadingTable,
    FixedTable,
    FractionTable,
    StretchedTable,
)


@dataclass(frozen=True)
class PatchSpec:
    """Patch embedding: images are split into patches of `size` times `size` pixels and `frames` consecutive
    frames, each of which passes through one linear layer as a vector, [channel, frame, row, column].
    """

    size: int
    frames: int = 1
    channels: int = 3
    bias: bool = False

    @property
    def width(self) -> int:
        return self.channels * self.frames * self.size**2


@dataclass(frozen=True)
class PlacedPictures:
    """Processor outputs `pixel_values` [images, patches, width], numbers from 0 to 1 with channels last,
    padded to the most patches, and `image_position_ids` [images, patches, 2], column and row of each patch,
    -1 for padding; for video frames `pixel_values_videos` and `video_position_ids`, with
    `num_frames_per_video`. If `centred` they are scaled to -1 to 1 (Gemma 4).
    """

    centred: bool = True


@dataclass(frozen=True)
class ShapedPictures:
    """Processor outputs `pixel_values` [images, patches, width], channels last, padded to the most patches,
    `spatial_shapes` [images, 2], rows and columns of patches, and `pixel_attention_mask` [images, patches], 0
    for padding (SigLIP 2).
    """


@dataclass(frozen=True)
class GridPictures:
    """Processor outputs patches, [patches of all images, width] pixels, and the grid of each image
    (Qwen2-VL): `pixel_values` with `image_grid_thw`, and for videos `pixel_values_videos` with
    `video_grid_thw`. Patches to be merged are adjacent and hold [channel, frame, row, column]; in `raster`
    order they come row by row and hold [frame, channel, row, column] (Muse Glimmer), those of one frame
    as [patches, channels, size, size] (Kimi K2.5).
    """

    raster: bool = False


@dataclass(frozen=True)
class FlatGrids(GridPictures):
    """The same in raster order for images alone, whose grids are `image_grid_hw`, rows and columns (Nemotron
    3 Omni).
    """

    raster: bool = True


@dataclass(frozen=True)
class PooledGrids:
    """The same as `GridPictures`, with a number n for each picture in `image_merge_sizes` and
    `video_merge_sizes`: blocks of n times n patches are pooled before the projector. With
    `video_compression_mask` only those pooled patches of videos make tokens that it marks (VideoLLaMA 3).
    """


@dataclass(frozen=True)
class StripPictures:
    """Processor outputs `pixel_values` [1, channels, size, patches of all images * size], the patches of an
    image next to one another, row by row, and `target_sizes` [images, 2], rows and columns of patches; for
    frames of videos `pixel_values_videos` and `target_sizes_videos`. Parts of an image in higher resolution
    (slices) are images of their own (MiniCPM-V 4.6).
    """


@dataclass(frozen=True)
class PaddedPictures:
    """Processor outputs `pixel_values` [images, channels, height, width], padded to the largest image, and
    `image_sizes` [images, 2] (Pixtral).
    """


@dataclass(frozen=True)
class SquarePictures:
    """Processor outputs `pixel_values` [images, channels, size, size], whatever the images' own size (CLIP).
    Pixels after the last whole patch are ignored. With a `CubicTable` or a `FractionTable` all images of a
    call may have another size. If `by_row` they are [rows, images, channels, size, size], with
    `pixel_attention_mask` [rows, images, size, size]; images of zeros fill up the rows (Idefics 3).
    """

    size: int
    by_row: bool = False


@dataclass(frozen=True)
class CroppedPictures:
    """Processor outputs `pixel_values` [images, channels, size, size], the whole images, and optionally parts
    of them, `pixel_values_local` [crops, channels, height, width], with the number of crops of each image,
    `num_local_patches` [images]. Tokens of the crops come before those of the whole (Step 3.7). With `most`
    a processor cuts images that are larger than three quarters of the size into 2 to `most` crops of three
    quarters of the size (DeepSeek-OCR 2).
    """

    size: int
    most: int | None = None


@dataclass(frozen=True)
class WindowedPictures:
    """Processor outputs `pixel_values` [crops, patches, width], channels last, of the whole images and of
    crops, `image_token_pooling` [tokens, n], the numbers among all patches of the up to n that make each
    token, -1 for none, and `image_grids` [images, 4], whose products of each two are the image's tokens,
    with `image_num_crops` [images]; or for videos `pixel_values_videos`, `video_token_pooling` and
    `video_grids` [videos, 3], with the tokens of images (Molmo 2). Crops have `side` times `side` patches.
    """

    side: int


@dataclass(frozen=True)
class MaskedPictures:
    """Processor outputs `pixel_values` [images, channels, size, size] and optionally `pixel_mask` [images,
    size, size], 1 for the image in the upper left corner. `tokens` pairs numbers of patches of the square
    with those of an image's tokens (Aria). If `by_row` they are [rows, images, channels, height, width], with
    `pixel_attention_mask` [rows, images, height, width]; images of zeros fill up the rows, and only whole
    patches count. `tokens` then has one pair, of the patches of the largest image (Idefics 2).
    """

    tokens: tuple[tuple[int, int], ...]
    by_row: bool = False


@dataclass(frozen=True)
class PartlyHiddenTiles:
    """Processor outputs `image_pixel_values` [images, 1 + tiles, channels, size, size], of each image the
    whole and tiles of it row by row, `image_sizes` [images, 2], height and width of the tiles together in
    pixels, and `image_attention_mask` [images, 1 + tiles, side, side], 0 for padding below the image and to
    its right. `side` is even. No token attends to padding; a patch of it may share a token with the image's
    patches (Phi-4-multimodal, arXiv:2503.01743, section 2.1.1).
    """

    size: int


@dataclass(frozen=True)
class AnyresPictures:
    """Processor outputs `pixel_values` [images, tiles, channels, size, size]: for each image the whole and,
    if it is the only image of its row, tiles of it in the best of `resolutions`, (height, width) in pixels;
    with `image_sizes` [images, 2] and `batch_num_images` [rows]. Without `most` every image has its tiles,
    and there is no `batch_num_images` (LLaVA-NeXT). For videos `pixel_values_videos` [videos,
    frames, channels, size, size], or for different lengths concatenated, [frames, channels, size, size], with
    `num_frames_per_video` [videos]. layers/grids/anyres.py turns the features of at most `most` tiles into
    tokens (LLaVA-OneVision). With `frame_pool` blocks of so many times so many patches of a frame are
    averaged before the projector, without the rest at the right and bottom edges (LLaVA-NeXT-Video). A tile
    makes `token_side` times `token_side` tokens; None: one for each patch.
    """

    size: int
    resolutions: tuple[tuple[int, int], ...]
    most: int | None
    frame_pool: int | None = None
    token_side: int | None = None


@dataclass(frozen=True)
class VisionSpec:
    """An image encoder and its projector into a language model.

    `blocks` are the encoder's, of width `hidden_size`. Each sees a whole image (or a time step of a video),
    except for those at `windowed`, which see windows of `window` times `window` merged patches. `projector`
    turns the encoder's outputs into features, one for each token with the id `image_id` or `video_id`.
    `positions` are those of these tokens; None: as for other tokens. A `position_table` encodes a patch's
    place in its image, with or without rotary positions. `blocks` may be empty (Gemma 4 12B). Outputs of the
    encoder layers at `deep` are added to its tokens after the first layers of the language model, lowest
    first, each through its own projector (DeepStack, arXiv:2406.04334). `pictures` is the form of the
    processor's output, `norm_pixels` a norm of each patch's pixels, `norm_patches` a norm of the embedded
    patches without positions, `norm_before` a norm before the blocks and `norm_after` one after them. A
    `class_token` is an additional token of each image, before or after its patches, which the projector
    receives only with `class_feature`, as an additional feature. `prefix_tokens` are learned tokens before
    the patches of each image, which the projector does not receive. With `taken` it receives the concatenated
    outputs of these layers instead of the last block's; 1 is the first, and 0 its input. Rotary positions of
    patches start at 1 if the class token is at 0. A `merger` merges patches between two layers. With `clips`
    all time steps of a video attend to one another, and the projector receives their mean; with
    `joined_steps` they attend to one another, and rotary positions have the time step as a third axis. With a
    `pyramid` the encoder has no blocks of this kind: it makes a feature of width `hidden_size` of each patch
    by convolutions over whole images. With a `query_encoder` it has a second part, with blocks of its own.

    In calls with pictures the tokens `marker_ids`, which frame images in the text, get rows of the
    projector's table in place of their embeddings (Ovis). `framing_ids` are tokens before and after an image
    and before and after a video, which go to the experts of pictures as these do, in a language model that
    has such experts.

    `kinds` is the keyword with which a processor gives the type of each token; images then require it.
    `spans` are tokens of the language model that all attend to one another: those of an image ("images"),
    the initial tokens of type 0 in a document ("prefix"), or all tokens of type 1 in a document, whatever is
    between them ("marked"). With `added` features are added to their tokens' embeddings and do not replace
    them. Ids from `unsaid` on are never learned, such as those that frame images. Sounds' tokens have the id
    `audio_id` and a type of their own.
    """

    hidden_size: int
    patches: PatchSpec
    blocks: tuple[BlockSpec, ...]
    projector: ProjectorSpec
    image_id: int
    video_id: int | None = None
    positions: TimeSpec | CanvasSpec | PlaceSpec | None = None
    windowed: tuple[int, ...] = ()
    window: int | None = None
    position_table: (
        StretchedTable
        | AntialiasedTable
        | BilinearTable
        | BicubicTable
        | ClipTable
        | FadingTable
        | CroppedTable
        | FixedTable
        | CubicTable
        | FractionTable
        | AxesTable
        | None
    ) = None
    deep: tuple[int, ...] = ()
    pictures: (
        PlacedPictures
        | ShapedPictures
        | GridPictures
        | PooledGrids
        | StripPictures
        | PaddedPictures
        | SquarePictures
        | CroppedPictures
        | WindowedPictures
        | MaskedPictures
        | PartlyHiddenTiles
        | AnyresPictures
    ) = GridPictures()
    norm_pixels: LayerNormSpec | None = None
    norm_patches: NormSpec | LayerNormSpec | None = None
    norm_before: NormSpec | LayerNormSpec | None = None
    norm_after: NormSpec | LayerNormSpec | None = None
    class_token: Literal["first", "last"] | None = None
    class_feature: bool = False
    prefix_tokens: int = 0
    taken: tuple[int, ...] = ()
    kinds: Literal["mm_token_type_ids", "token_type_ids"] | None = None
    spans: Literal["images", "prefix", "marked"] | None = None
    added: bool = False
    unsaid: int | None = None
    audio_id: int | None = None
    clips: bool = False
    joined_steps: bool = False
    marker_ids: tuple[int, ...] = ()
    framing_ids: tuple[int, int, int, int] | None = None
    merger: WindowMergerSpec | None = None
    pyramid: PyramidSpec | None = None
    query_encoder: QueryEncoderSpec | None = None

    @property
    def merge(self) -> int:
        """The number of patches on a side of what makes a token, or what a query reads."""
        within = self.merger or self.query_encoder
        return self.projector.merge * (1 if within is None else within.merge)

    @property
    def merges_after(self) -> int | None:
        """The layer after which patches are merged, if others follow it."""
        if self.query_encoder is not None:
            return len(self.blocks) - 1
        return None if self.merger is None else self.merger.after

    @property
    def feature_size(self) -> int:
        """The width of what the projector reads of one state of the encoder."""
        return self.hidden_size if self.query_encoder is None else self.query_encoder.hidden_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the language model to whose outputs further features are added; -1 is its input."""
        if isinstance(self.projector, WindowQueriesSpec):
            return tuple(layer - 1 for layer in self.projector.layers)
        return tuple(range(len(self.deep)))

    @property
    def layered(self) -> bool:
        """Whether all features are added in this way, to embeddings of zeros."""
        return isinstance(self.projector, WindowQueriesSpec)

    @property
    def rows_end(self) -> bool:
        """Whether an image has a token after each row, one before and one after all."""
        return isinstance(self.projector, RowsProjectorSpec)

    @property
    def paired(self) -> bool:
        """Whether two time steps of a video make tokens together."""
        return isinstance(self.projector, ResamplerSpec)

    @property
    def deep_projector(self) -> PatchMergerSpec:
        """Projector of the layers at `deep`, which normalises concatenated patches.

        Raises:
            ValueError: the projector does not support that.
        """
        if not isinstance(self.projector, PatchMergerSpec):
            raise ValueError(f"no projector of lower layers is known for a {type(self.projector).__name__}")
        return replace(self.projector, norm_merged=True)


@dataclass(frozen=True)
class TiledVisionSpec:
    """An encoder of images split into at most `tiles` square tiles of `image_size` pixels, arranged in one of
    `ratios` (Llama 3.2 Vision): see layers/vision/tiled.py.

    `blocks` run first, then `global_blocks`; `norm` is used before all and between them. Features are the
    last output concatenated with those of `blocks` at `taken`. The token `image_id` stands for an image in
    the text.
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
        """Width of the features."""
        return self.hidden_size * (1 + len(self.taken))
