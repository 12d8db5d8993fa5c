"""Build `Pictures` from the outputs of processors that give patches with the grid of each picture, or tiles
with the patches of each that are an image's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.layers.specs import (
    ClipTable,
    ClockSpec,
    FlatGrids,
    GridPictures,
    PartlyHiddenTiles,
    TimeSpec,
    VisionSpec,
)
from liger_models.layers.vision.patch_order import Grid, cut_image, in_blocks
from liger_models.layers.vision.pictures import Pictures, PooledPictures, TilesOfPictures

DOWNSAMPLING = "downsample_mode"
ROUNDED = (torch.bfloat16, torch.float16)  # too coarse for the seconds of videos


def grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Pictures as patches with the grid of each."""
    timed: TimeSpec | None = None
    if isinstance(spec.positions, TimeSpec) and spec.positions.tokens_per_second is not None:
        timed = spec.positions
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    given = taken(keywords, *names, *([timed.seconds] if timed else []))  # elsewhere ignored
    images, image_grids = _of_kind(spec, merge, given, "pixel_values", "image_grid_thw")
    videos, video_grids = _of_kind(spec, merge, given, "pixel_values_videos", "video_grid_thw")
    seconds = _seconds(timed, given, video_grids) if timed else None
    patches = [values for values in (images, videos) if values is not None]
    if not patches:
        return None
    grids = image_grids + video_grids
    forms: dict[str, Any] = {"clips": spec.clips, "joined": spec.joined_steps}
    if spec.rows_end:
        forms["rows_end"] = True
        for i, (t, _, _) in enumerate(grids):
            if t != 1:
                raise DataError(f"image_grid_thw[{i}] has {t} time steps; expected images, which have 1")
    if spec.paired:
        _check_pairs(image_grids, video_grids)
        forms["paired"] = True
    return Pictures(torch.cat(patches), grids, len(image_grids), seconds, **forms)


def _check_pairs(images: list[Grid], videos: list[Grid]) -> None:
    """Check the time steps of pictures whose videos make tokens of two at a time."""
    for i, (t, _, _) in enumerate(images):
        if t != 1:
            raise DataError(f"image_grid_thw[{i}] has {t} time steps; an image has 1: pass it as a video")
    for i, (t, _, _) in enumerate(videos):
        if t % 2:
            raise DataError(
                f"video_grid_thw[{i}] has {t} time steps, two of which make a token together; expected an "
                "even number, as the processor samples"
            )


def flat_grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Images as patches with the rows and columns of each: see `FlatGrids`."""
    given = taken(keywords, "pixel_values", "image_grid_hw")
    patches, grids = _of_kind(spec, merge, given, "pixel_values", "image_grid_hw")
    return None if patches is None else Pictures(patches, grids, len(grids))


def _of_kind(
    spec: VisionSpec, merge: int, given: Mapping[str, Any], pixels: str, grids: str
) -> tuple[Tensor | None, list[Grid]]:
    if not together(given, pixels, grids):
        return None, []
    raster = isinstance(spec.pictures, GridPictures) and spec.pictures.raster
    values, table = given[pixels], torch.as_tensor(given[grids])
    values = values.flatten(1) if raster else values
    axes = ("height", "width") if isinstance(spec.pictures, FlatGrids) else ("time", "height", "width")
    if table.dim() != 2 or table.shape[1] != len(axes) or table.is_floating_point():
        raise DataError(
            f"{grids} must be integers [pictures, {len(axes)}], their patches in {', '.join(axes[:-1])} and "
            f"{axes[-1]}; found {table.dtype} of shape {tuple(table.shape)}"
        )
    shapes: list[Grid] = [(*(1,) * (3 - len(axes)), *sizes) for sizes in table.tolist()]
    for i, (t, h, w) in enumerate(shapes):
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise DataError(
                f"{grids}[{i}] is {(t, h, w)}; expected numbers above 0, height and width multiples of "
                f"{merge}, since so many patches side by side make one token"
            )
        if isinstance(spec.position_table, ClipTable) and t > spec.position_table.steps:
            raise DataError(
                f"{grids}[{i}] has {t} time steps; the model has positions for {spec.position_table.steps}: "
                "give longer videos as several clips"
            )
    total, width = sum(t * h * w for t, h, w in shapes), spec.patches.width
    if tuple(values.shape) != (total, width) or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape [{total}, {width}], by {grids} and the model's "
            f"patches; found {values.dtype} of shape {tuple(values.shape)}"
        )
    return in_blocks(values, shapes, spec.patches, merge) if raster else values, shapes


def _seconds(positions: TimeSpec, keywords: Mapping[str, Any], videos: list[Grid]) -> list[float] | None:
    name, clock = positions.seconds, isinstance(positions, ClockSpec)
    given = keywords.get(name)
    if given is None:
        if clock and videos:
            raise DataError(f"got videos without {name}, which determines their positions: pass it, too")
        return None
    if isinstance(given, Tensor) and given.dtype in ROUNDED:
        raise DataError(
            f"{name} came as {given.dtype}, which would change the videos' positions; pass a list (mixed "
            "precision casts floating point tensors)"
        )
    seconds = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(seconds) != len(videos):
        raise DataError(f"{name} has {len(seconds)} values for {len(videos)} videos; expected as many")
    if isinstance(positions, ClockSpec) and positions.whole:
        rate = positions.tokens_per_second or 1
        for i, (second, (steps, _, _)) in enumerate(zip(seconds, videos, strict=True)):
            if steps > 1 and (rate * second) % 1:
                raise DataError(
                    f"{name}[{i}] is {second}, {rate * second} positions; positions that are not whole "
                    f"numbers are not supported: sample frames so that a time step is a multiple of 1/{rate} "
                    "seconds"
                )
    return seconds


def strips(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Pictures as patches next to one another: see `StripPictures`. Frames of videos, and slices, are
    pictures of their own.

    Raises:
        DataError: also another `downsample_mode` than the model's, which decides how many patches make a
            token.
    """
    names = "pixel_values", "target_sizes", "pixel_values_videos", "target_sizes_videos"
    given = taken(keywords, *names, DOWNSAMPLING)
    mode, own = given.get(DOWNSAMPLING), "4x" if spec.merger is None else "16x"
    if mode is not None and mode != own:
        raise DataError(
            f"{DOWNSAMPLING} is {mode!r}, and this model was loaded with {own!r}: change it in config.json "
            "and load the model again"
        )
    images, image_grids = _of_strips(spec, merge, given, *names[:2])
    videos, video_grids = _of_strips(spec, merge, given, *names[2:])
    patches = [values for values in (images, videos) if values is not None]
    return Pictures(torch.cat(patches), image_grids + video_grids, len(image_grids)) if patches else None


def _of_strips(
    spec: VisionSpec, merge: int, given: Mapping[str, Any], pixels: str, sizes: str
) -> tuple[Tensor | None, list[Grid]]:
    if not together(given, pixels, sizes):
        return None, []
    values, table = given[pixels], torch.as_tensor(given[sizes])
    if table.dim() != 2 or table.shape[1] != 2 or table.is_floating_point():
        raise DataError(
            f"{sizes} must be integers [pictures, 2], their patches in height and width; found {table.dtype} "
            f"of shape {tuple(table.shape)}"
        )
    grids: list[Grid] = [(1, h, w) for h, w in table.tolist()]
    for i, (_, h, w) in enumerate(grids):
        if min(h, w) < 1 or h % merge or w % merge:
            raise DataError(
                f"{sizes}[{i}] is {(h, w)}; expected numbers above 0, multiples of {merge}, since so many "
                "patches side by side make one token"
            )
    size, count = spec.patches.size, sum(h * w for _, h, w in grids)
    expected = (1, spec.patches.channels, size, count * size)
    if tuple(values.shape) != expected or not values.is_floating_point():
        raise DataError(
            f"{pixels} must be floating point of shape {expected}, by {sizes} and the model's patches; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if not grids:
        return None, []
    patches = values[0].unflatten(2, (count, size)).permute(2, 0, 1, 3).flatten(1)
    return in_blocks(patches, grids, spec.patches, merge), grids


def seconds_as_numbers(keywords: dict[str, Any]) -> dict[str, Any]:
    """Convert the seconds of videos in a call's keywords to numbers. Mixed precision of FSDP2 casts all
    floating point tensors in the arguments of a sharded module, and seconds in bfloat16 would shift the
    videos' positions.
    """
    for name in (TimeSpec.seconds, ClockSpec.seconds):
        seconds = keywords.get(name)
        if isinstance(seconds, Tensor) and seconds.dtype not in ROUNDED:
            keywords = keywords | {name: seconds.tolist()}
    return keywords


def pooled_grids(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """The same, with the number by which each is pooled: see `PooledGrids`."""
    names = "image_merge_sizes", "video_merge_sizes", "video_compression_mask"
    given, made = taken(keywords, *names), grids(spec, merge, keywords)
    images, videos = ([], []) if made is None else (made.grids[: made.images], made.grids[made.images :])
    sides = [*_sides(given, names[0], images), *_sides(given, names[1], videos)]
    mask = given.get(names[2])
    if mask is not None:
        mask, pooled = torch.as_tensor(mask).cpu(), zip(videos, sides[len(images) :], strict=True)
        count = sum(t * h * w // side**2 for (t, h, w), side in pooled)
        if mask.dtype != torch.bool or tuple(mask.shape) != (count,):
            raise DataError(
                f"{names[2]} must be bool [{count}], by the videos' grids and merge sizes; found "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
    if made is None:
        return None
    return PooledPictures(made.patches, made.grids, made.images, sides, mask)


def _sides(given: Mapping[str, Any], name: str, pictures: list[Grid]) -> list[int]:
    """The numbers under this name, one per picture."""
    sides = torch.as_tensor(given.get(name, [])).flatten().tolist()
    fit = len(sides) == len(pictures) and all(
        type(side) is int and side > 0 and h % side == w % side == 0
        for side, (_, h, w) in zip(sides, pictures, strict=True)
    )
    if not fit:
        raise DataError(
            f"{name} must be a whole number for each picture, by which the height and the width of its grid "
            f"can be divided; found {sides} for the grids {pictures}"
        )
    return sides


def taken(keywords: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the given names from the keywords and return those present."""
    return {name: value for name in names if (value := keywords.pop(name, None)) is not None}


def together(given: Mapping[str, Any], *names: str) -> bool:
    """Return True if all are given, False if none; raise DataError if some are missing."""
    there, missing = [n for n in names if n in given], [n for n in names if n not in given]
    if there and missing:
        raise DataError(
            f"got {' and '.join(there)} without {' and '.join(missing)}: pass all, as the processor does"
        )
    return bool(there)


# -- images as a whole and as tiles with padding (Phi-4-multimodal, arXiv:2503.01743, section 2.1.1)
#
# The grid of the tiles, cropped to the image, by blocks of two times two patches, with a vector after each
# row; a separator; the whole, likewise. A block at the edge of the image may have patches of padding. These
# attend to the image's patches of their tile, and no patch attends to them.

PIXELS, SIZES, MASK = "image_pixel_values", "image_sizes", "image_attention_mask"
BLOCK = 2  # side of a token, in patches


def hidden_tiles(spec: VisionSpec, merge: int, keywords: dict[str, Any]) -> Pictures | None:
    """Images as tiles with padding: see `PartlyHiddenTiles`."""
    assert isinstance(spec.pictures, PartlyHiddenTiles)
    given = taken(keywords, PIXELS, SIZES, MASK)
    if not together(given, PIXELS, SIZES, MASK):
        return None
    values, sizes = given[PIXELS], torch.as_tensor(given[SIZES])
    mask = torch.as_tensor(given[MASK]).cpu() != 0
    size, side = spec.pictures.size, spec.pictures.size // spec.patches.size
    shape = (spec.patches.channels, size, size)
    if values.dim() != 5 or tuple(values.shape[2:]) != shape or not values.is_floating_point():
        raise DataError(
            f"{PIXELS} must be floating point of shape [images, tiles, {', '.join(map(str, shape))}]; found "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    if tuple(sizes.shape) != (len(values), 2) or tuple(mask.shape) != (*values.shape[:2], side, side):
        raise DataError(
            f"{SIZES} must be [{len(values)}, 2] and {MASK} {[*values.shape[:2], side, side]}, by {PIXELS}; "
            f"found {list(sizes.shape)} and {list(mask.shape)}"
        )
    patches, windows, counts = [], [], []
    tiles: list[Tile] = []
    for i, (image, (height, width), shown) in enumerate(zip(values, sizes.tolist(), mask, strict=True)):
        rows, columns = height // size, width // size
        count = rows * columns
        if height % size or width % size or not 0 < count < len(image):
            raise DataError(
                f"{SIZES}[{i}] is {(height, width)}; expected multiples of {size}, of tiles that {PIXELS} "
                f"has next to the whole, here {len(image) - 1}"
            )
        h, w = _shown(shown[: count + 1], rows, columns, i)
        own, lines = tiles_and_tokens(side, rows, columns, h, w)
        first = sum(tile.patches for tile in tiles)
        windows.append(torch.where(lines < 0, lines, lines + first))
        counts.append(len(lines))
        tiles += own
        for pixels, tile in zip([*image[1 : count + 1], image[0]], own, strict=True):
            cells = cut_image(pixels, (1, side, side), 1, spec.patches.size)
            whole = tile.grid == (1, side, side)
            patches.append(cells if whole else cells[to_device(tile.order, cells.device)])
    if not patches:
        return None
    grids, hidden = [tile.grid for tile in tiles], [tile.hidden for tile in tiles]
    return TilesOfPictures(torch.cat(patches), grids, torch.cat(windows), counts, hidden)


def _shown(mask: Tensor, rows: int, columns: int, image: int) -> tuple[int, int]:
    """Rows and columns of an image's patches in the grid of its tiles, from the mask [1 + tiles, side, side].

    Raises:
        DataError: these are not in the upper left corner, a tile has none, or the whole is not shown.
    """
    grid = mask[1:].unflatten(0, (rows, columns)).transpose(1, 2).flatten(2).flatten(0, 1)
    h, w, side = int(grid[:, 0].sum()), int(grid[0].sum()), mask.shape[1]
    corner = torch.zeros_like(grid)
    corner[:h, :w] = True
    fits = (-(-h // side), -(-w // side)) == (rows, columns) and torch.equal(grid, corner)
    if not fits or not bool(mask[0].all()):
        raise DataError(
            f"{MASK}[{image}] must be 1 for the whole image, and for the patches of an image in the upper "
            "left corner of its tiles, of which each has some, and 0 elsewhere"
        )
    return h, w


class Tile(NamedTuple):
    """The patches of a tile that tokens read.

    Attributes:
        grid: (1, rows, columns) of the image's.
        order: numbers of patches, the image's row by row, then those of padding that share a token with them.
        places: the place of each patch of the tile among these, [side, side], -1 for others.
    """

    grid: Grid
    order: Tensor
    places: Tensor

    @property
    def patches(self) -> int:
        """Their number."""
        return len(self.order)

    @property
    def hidden(self) -> int:
        """How many are of padding."""
        return len(self.order) - self.grid[1] * self.grid[2]


@cached_tensors()
def _tile(side: int, h: int, w: int) -> Tile:
    """A tile of side^2 patches; the upper left h times w are the image's."""
    numbers = torch.arange(side**2, device="cpu").view(side, side)
    shared = torch.zeros(side, side, dtype=torch.bool, device="cpu")
    shared[: h + h % BLOCK, : w + w % BLOCK] = True
    shared[:h, :w] = False
    order = torch.cat([numbers[:h, :w].flatten(), numbers[shared]])
    places = torch.full((side**2,), -1, device="cpu")
    places[order] = torch.arange(len(order), device="cpu")
    return Tile((1, h, w), order, places.view(side, side))


def tiles_and_tokens(side: int, rows: int, columns: int, h: int, w: int) -> tuple[list[Tile], Tensor]:
    """For an image of h times w patches in `rows` times `columns` tiles of side^2: the tiles, row by row, and
    the whole; and the patches of each token, [F, 4], numbered from the first tile's.
    """
    tiles = [
        _tile(side, min(side, h - row * side), min(side, w - column * side))
        for row in range(rows)
        for column in range(columns)
    ]
    begins = [0, *itertools.accumulate(tile.patches for tile in tiles)]
    places = torch.stack([tile.places + begin for tile, begin in zip(tiles, begins, strict=False)])
    grid = places.unflatten(0, (rows, columns)).transpose(1, 2).reshape(rows * side, columns * side)
    whole = _tile(side, side, side)
    separator = torch.full((1, BLOCK**2), TilesOfPictures.SEPARATOR, device="cpu")
    lines = [_lines(grid, h, w), separator, _lines(whole.places + begins[-1], side, side)]
    return [*tiles, whole], torch.cat(lines)


def _lines(grid: Tensor, h: int, w: int) -> Tensor:
    """The blocks of the first h rows and w columns of numbers in a grid, with `ROW_END` after each row."""
    height, width = -(-h // BLOCK), -(-w // BLOCK)
    grid = grid[: height * BLOCK, : width * BLOCK]
    blocks = grid.unflatten(1, (width, BLOCK)).unflatten(0, (height, BLOCK)).transpose(1, 2).flatten(2)
    return F.pad(blocks, (0, 0, 0, 1), value=TilesOfPictures.ROW_END).flatten(0, 1)
