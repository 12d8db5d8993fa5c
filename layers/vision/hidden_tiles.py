"""Images as a whole and as tiles with padding, the tokens made of their patches, and the projectors of images
and of sounds next to them (Phi-4-multimodal, arXiv:2503.01743, section 2.1).

    the grid of the tiles, cropped to the image, by blocks of two times two patches, with a vector after each
    row; a separator; the whole, likewise

A block at the edge of the image may have patches of padding. These attend to the image's patches of their
tile, and no patch attends to them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.convert.errors import DataError
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.layers.projections.linear import Linear
from liger_models.layers.specs import PartlyHiddenTiles, TileRowsSpec, TwoWaysSpec, VisionSpec
from liger_models.layers.vision.grid_inputs import taken, together
from liger_models.layers.vision.patch_order import Grid, cut_image
from liger_models.layers.vision.pictures import Pictures, TilesOfPictures

PIXELS, SIZES, MASK = "image_pixel_values", "image_sizes", "image_attention_mask"
BLOCK = 2  # side of a token, in patches


class TileRows(nn.Module):
    """`linear_2(gelu(linear_1(rows)))`, with rows the means of a token's patches, and the vectors that end
    rows and separate tiles from the whole.

    Args:
        width: of a patch, D.
        hidden_size: of the language model, H.
        spec: of the projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: TileRowsSpec):
        super().__init__()
        self.ends = RowEnds(width)
        self.linear_1, self.linear_2 = Linear(width, hidden_size), Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, windows: Tensor) -> Tensor:
        """x [P, D], and the numbers of each token's patches, windows [F, 4] on the host -> [F, H]."""
        of_patches = windows[:, 0] >= 0
        order = of_patches.cumsum(0) - 1
        count = int(order[-1]) + 1
        for place, kind in enumerate((TilesOfPictures.ROW_END, TilesOfPictures.SEPARATOR)):
            order = torch.where(windows[:, 0] == kind, count + place, order)
        which = to_device(windows[of_patches].flatten(), x.device)
        means = x.index_select(0, which).unflatten(0, (-1, windows.shape[1])).mean(1)
        rows = torch.cat([means, self.ends().to(x.dtype)])[to_device(order, x.device)]
        return self.linear_2(F.gelu(self.linear_1(rows)))


class RowEnds(nn.Module):
    """The vector that ends a row, and the one that separates tiles from the whole, [width] each."""

    def __init__(self, width: int):
        super().__init__()
        self.row_end = nn.Parameter(torch.empty(width))
        self.separator = nn.Parameter(torch.empty(width))

    def forward(self) -> Tensor:
        """Both, [2, width]."""
        return torch.stack([self.row_end, self.separator])

    def reset_parameters(self, *_: object) -> None:
        """Initialise to zero, as the reference does."""
        nn.init.zeros_(self.row_end)
        nn.init.zeros_(self.separator)


class TwoLayers(nn.Module):
    """`linear_2(gelu(linear_1(x)))`, from `width` to `hidden_size`."""

    def __init__(self, width: int, hidden_size: int):
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, hidden_size), Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [F, width] -> [F, hidden_size]."""
        y: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return y


class TwoWays(nn.Module):
    """Two projections, of frames of sounds alone and of sounds next to images.

    Args:
        width: of a frame, D.
        hidden_size: of the language model, H.
        spec: of the projector.
    """

    def __init__(self, width: int, hidden_size: int, spec: TwoWaysSpec):
        super().__init__()
        self.alone, self.with_images = (TwoLayers(width, hidden_size) for _ in range(2))

    def forward(self, x: Tensor, with_images: Tensor | None = None, both: bool = False) -> Tensor:
        """x [F, D] -> [F, H].

        Args:
            with_images: mask of the frames of sounds next to images, [F] on the host; None: there are none.
            both: run both projections, as other processes may, whatever the frames.
        """
        ways = self.alone, self.with_images
        some = with_images is not None and bool(with_images.any())
        if with_images is None or not some or bool(with_images.all()):
            chosen = int(some)
            y: Tensor = ways[chosen](x)
            return y + 0 * ways[1 - chosen](x[:1]).sum() if both else y
        order = torch.cat([(~with_images).nonzero()[:, 0], with_images.nonzero()[:, 0]])
        count = len(x) - int(with_images.sum())
        rows = x.index_select(0, to_device(order, x.device))
        made = torch.cat([way(part) for way, part in zip(ways, (rows[:count], rows[count:]), strict=True)])
        return made.index_select(0, to_device(order.argsort(), x.device))


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
    """A tile of side^2 patches, of which the upper left h times w are the image's."""
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
