"""Learned tables of positions: for pictures of one size, or interpolated to the size of each picture.

    x += table[place]                                           one size; bicubic interpolation to another
    x += table[floor(row * S / rows), floor(column * S / columns)]
    x += table_x[column] + table_y[row]
    x += sum over four taps of weight * table[tap]              interpolated

    x += sum over j, k of A[row, j] * B[column, k] * table[j, k]       resized like an image

Interpolated tables are squares of side S. In the first kind, patch i of h has the coordinate
i * (S - 1) / max(h - 1, 1), and likewise in width: corners map to corners, with linear interpolation between
(Qwen3-VL). In the second kind A [h, S] and B [w, S] are torch's resizing of one axis: bilinear with
antialiasing (SigLIP 2, arXiv:2502.14786), bicubic (GLM-4.1V, arXiv:2507.01006, section 2), with antialiasing
in DeepSeek-OCR 2, linear between
the rows of a table with zeros around it, which fades at the border (Muse Glimmer, which resizes to [w, h]
and gives patch i, row by row, position i of that, as its model was trained), or bilinear to max(h, w) on both
axes, of which the first h and w count (C-RADIO, arXiv:2312.06709).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.specs import (
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
    VisionSpec,
)
from liger_models.layers.vision.patch_order import Grid, places_of


def make_table(spec: VisionSpec) -> PositionTable | PositionsByAxes | None:
    """Build the table of a spec; None if it has none."""
    match spec.position_table:
        case StretchedTable(side):
            return StretchedPositions(side**2, spec.hidden_size, side)
        case AntialiasedTable(side, cubic):
            mode = "smooth" if cubic else "antialiased"
            return ResizedPositions(side**2, spec.hidden_size, side, mode)
        case BilinearTable(side, unread):
            return ResizedPositions(side**2, spec.hidden_size, side, "bilinear", unread)
        case BicubicTable(side):
            return ResizedPositions(side**2, spec.hidden_size, side, "bicubic")
        case ClipTable(side):
            return ClipPositions(side**2, spec.hidden_size, side, "bicubic")
        case CroppedTable(side):
            return ResizedPositions(side**2, spec.hidden_size, side, "cropped")
        case FadingTable(side):
            return ResizedPositions(side**2, spec.hidden_size, side, "fading")
        case FixedTable(side) | CubicTable(side) as table:
            rows = side**2 + (spec.class_token is not None)
            kind = FixedPositions if isinstance(table, FixedTable) else CubicPositions
            return kind(rows, spec.hidden_size, side, int(spec.class_token == "first"))
        case FractionTable(side, divided):
            return FractionPositions(side**2, spec.hidden_size, side, divided)
        case AxesTable(size):
            return PositionsByAxes(size, spec.hidden_size)
    return None


class PositionTable(nn.Module):
    """Position embeddings of patches, from a table with rows of `width`; `side` is the side of its square."""

    def __init__(self, rows: int, width: int, side: int):
        super().__init__()
        self.side, self.axes = side, {"side": side}
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Return [tokens, width], for the tokens of pictures in the order of `Pictures`."""
        raise NotImplementedError

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class FixedPositions(PositionTable):
    """One row per patch, in row-major order, after the first `first` rows; returns these, too."""

    def __init__(self, rows: int, width: int, side: int, first: int):
        super().__init__(rows, width, side)
        self.first = first

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        return self._of_pictures(self.weight, self.side, len(grids), merge)

    def _of_pictures(self, rows: Tensor, side: int, count: int, merge: int) -> Tensor:
        order = _rows(side, merge, self.first, len(rows))
        if order is not None:
            rows = rows[to_device(order, rows.device)]
        return rows.repeat(count, 1)


class CubicPositions(FixedPositions):
    """Interpolates bicubically to squares of another size, one for all pictures; in float32, for any table
    dtype.
    """

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        side = grids[0][1]
        if side == self.side:
            return super().forward(grids, merge)
        before, patches, after = at_least_float32(self.weight).split(
            [self.first, self.side**2, len(self.weight) - self.first - self.side**2]
        )
        square = patches.T.unflatten(1, (self.side, self.side))[None]
        stretched = F.interpolate(square, (side, side), mode="bicubic", align_corners=False)[0].flatten(1).T
        return self._of_pictures(torch.cat([before, stretched, after]), side, len(grids), merge)


class StretchedPositions(PositionTable):
    """Interpolates bilinearly to each picture's size; in float32, for any table dtype."""

    def forward(self, grids: Iterable[Grid], merge: int) -> Tensor:
        taps, weights = (torch.cat(x) for x in zip(*(self._taps(grid, merge) for grid in grids), strict=True))
        device = self.weight.device
        taps, weights = to_device(taps, device), to_device(weights, device)
        rows = (self.weight[tap] * weight[:, None] for tap, weight in zip(taps.T, weights.T, strict=True))
        return functools.reduce(torch.add, rows)

    def _taps(self, grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
        return _taps(grid, merge, self.side)


class ResizedPositions(PositionTable):
    """Resizes the table to each picture's size like an image; in float32, for any table dtype. `mode` is
    "bilinear", "antialiased" for the same with antialiasing, "bicubic", "smooth" for the same with
    antialiasing, "fading", linear with zeros around the table, or "cropped", "bilinear" to a square from
    which the picture is cut. `unread` further rows come first.
    """

    def __init__(self, rows: int, width: int, side: int, mode: str, unread: int = 0):
        super().__init__(rows + unread, width, side)
        self.mode, self.unread = mode, unread

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        made = {grid: self._of_size(grid, merge) for grid in dict.fromkeys(grids)}
        return torch.cat([made[grid] for grid in grids])

    def _of_size(self, grid: Grid, merge: int) -> Tensor:
        table = at_least_float32(self.weight[self.unread :]).unflatten(0, (self.side, self.side))
        rows, columns = (
            to_device(self._of_axis(n, max(grid[1:])), table.device).to(table.dtype) for n in grid[1:]
        )
        row, column = to_device(places_of([grid], merge), table.device)
        with torch.autocast(table.device.type, enabled=False):
            if self.mode == "fading":  # patches count through a picture of exchanged sides
                turned = torch.einsum("wj,jkd,hk->whd", columns, table, rows)
                return turned.flatten(0, 1)[row * grid[2] + column]
            return torch.einsum("hj,jkd,wk->hwd", rows, table, columns)[row, column]

    def _of_axis(self, size: int, longest: int) -> Tensor:
        if self.mode == "cropped":
            return _resizing(longest, self.side, "bilinear")[:size]
        return _resizing(size, self.side, self.mode)


class ClipPositions(ResizedPositions):
    """Adds to the patches of time step s of videos, if they have several, [sin(s f) | cos(s f)] with f_j =
    10000^(-2j/width).
    """

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        x = super().forward([(1, h, w) for t, h, w in grids for _ in range(t)], merge)
        if all(t == 1 for t, _, _ in grids):
            return x
        times = torch.cat([_times(t, x.shape[1]).repeat_interleave(h * w, 0) for t, h, w in grids])
        return x + to_device(times, x.device).to(x.dtype)


class FractionPositions(PositionTable):
    """The row and column of the table at the same fraction of the picture, a quotient if `divided`."""

    def __init__(self, rows: int, width: int, side: int, divided: bool):
        super().__init__(rows, width, side)
        self.divided = divided

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        rows = torch.cat([_at_fractions(grid, merge, self.side, self.divided) for grid in grids])
        return self.weight[to_device(rows, self.weight.device)]

    def with_first(self, places: Tensor, lengths: Sequence[int], more: Sequence[int]) -> Tensor:
        """Positions [P, width] of pictures of these numbers of patches, with so many times the table's first
        row after each.
        """
        first = [self.weight[:1].expand(count, -1) for count in more]
        pieces = zip(places.split(list(lengths)), first, strict=True)
        return torch.cat([part for both in pieces for part in both])


class PositionsByAxes(nn.Module):
    """The sum of two rows of `width` for each patch, one by its column and one by its row, from `size`
    each.
    """

    def __init__(self, size: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, size, width))

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Return [P, width], for the patches of pictures in the order of `Pictures`."""
        row, column = to_device(places_of(grids, merge), self.weight.device)
        # Accumulate the gradients of all patches of a row or column in float32.
        used = at_least_float32(self.weight[:, : max(max(grid[1:]) for grid in grids)])
        return used[0, column] + used[1, row]

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


@cached_tensors()
def _rows(side: int, merge: int, first: int, rows: int) -> Tensor | None:
    """The row of the table for each token of a picture, on the host; None: in order."""
    if merge == 1:
        return None
    row, column = places_of([(1, side, side)], merge)
    rest = torch.arange(rows, device="cpu")
    return torch.cat([rest[:first], first + row * side + column, rest[first + side**2 :]])


@cached_tensors()
def _times(steps: int, width: int) -> Tensor:
    """Embeddings of time steps, [steps, width] float32 on the host; zero for a single one."""
    if steps == 1:
        return torch.zeros(1, width, device="cpu")
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    angles = torch.outer(torch.arange(steps, dtype=torch.float32, device="cpu"), 1.0 / 10000.0**exponents)
    return torch.cat([angles.sin(), angles.cos()], 1)


@cached_tensors()
def _at_fractions(grid: Grid, merge: int, side: int, divided: bool) -> Tensor:
    """The table row of each patch, on the host; in the reference's float32, which may round a fraction to
    below a border.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side, device="cpu")

    def place(index: Tensor, size: int) -> Tensor:
        if divided:
            return torch.bucketize(index / size, borders, right=True)
        fraction = index.float() * (1.0 / torch.tensor(size, device="cpu"))
        return torch.bucketize(fraction.clamp(max=1 - 1e-6), borders, right=True)

    row, column = places_of([grid], merge)
    return place(row, grid[1]) * side + place(column, grid[2])


@cached_tensors()
def _resizing(size: int, side: int, mode: str) -> Tensor:
    """The matrix [size, side] that resizes an axis from `side` to `size`, in float64 on the host."""
    if mode == "fading":
        at = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) * (side / size) - 0.5
        rows = torch.arange(side, dtype=torch.float64, device="cpu")
        return (1 - (at[:, None] - rows).abs()).clamp(min=0)
    columns = torch.eye(side, dtype=torch.float64, device="cpu")[None, None]
    antialias = mode in ("antialiased", "smooth")
    mode = {"antialiased": "bilinear", "smooth": "bicubic"}.get(mode, mode)
    return F.interpolate(columns, (size, side), mode=mode, align_corners=False, antialias=antialias)[0, 0]


@cached_tensors()
def _taps(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The table rows that each patch interpolates, [P, 4], and their weights, on the host."""
    (_, h, w), places = grid, places_of([grid], merge)
    (top, low), (left, right) = (_axis(x, n, side) for x, n in zip(places, (h, w), strict=True))
    taps = [i * side + j for i, _ in (top, low) for j, _ in (left, right)]
    weights = [a * b for _, a in (top, low) for _, b in (left, right)]
    return torch.stack(taps, 1), torch.stack(weights, 1)


def _axis(place: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two neighbours of each coordinate in the table, and their weights in float32."""
    at = place.float() * (side - 1) / max(size - 1, 1)
    first = at.floor()
    return [
        ((first.long() + step).clamp(max=side - 1), (1 - (at - first - step).abs()).clamp(min=0))
        for step in (0, 1)
    ]
