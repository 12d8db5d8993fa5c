"""Positions on three axes, time, row and column, of images whose slices lie on one canvas (MiniCPM-V 4.7).

A frame is an image or a frame of a video, followed by its slices, the parts of it in higher resolution: rows
of pictures of their own, all framed by tokens,

    <image> tokens </image> <slice> tokens </slice><slice> tokens </slice> newline <slice> tokens </slice> ...

The canvas has the size of all slices, taken to be as large as the first one, in merged patches; without
slices it is the image's own size [rows, columns]. All tokens of a frame have the time s, the position of the
text that would follow the token before it. In row and column,

    <image>     max(s - 1, 0)                                   before the canvas
    image       s + round(i (R - 1) / (rows - 1))               R of the canvas, of row i, stretched over it
    </image>    s + R                                           after it
    slice       s + first row of the slice + i
    <slice>     s + first row of the slice
    </slice>    s + last row of the slice
    newline     s + last row of the row of slices, and in column after all columns
    others      s

and likewise in column. Others are markers that directly follow the last picture. The next token of the text
is at s + max(R, C) + 1. A picture that follows `<slice>` is a slice of the frame before it.

Everything is computed on the device without synchronisation: the order of tokens is known only there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.specs import CanvasSpec, ClockSpec, PlaceSpec, TimeSpec
from liger_models.layers.vision.pictures import Pictures
from liger_models.layers.vision.positions import (
    IMAGE,
    TEXT,
    AxisPositions,
    axis_positions,
    end_of_positions,
    place_positions,
)


def canvas_positions(
    documents: Documents, kinds: Tensor, ids: Tensor, pictures: Pictures, merge: int, spec: CanvasSpec
) -> AxisPositions:
    """The positions of tokens ids [T] of these kinds. `wrong` also where a frame would continue in another
    document.
    """
    device, total = ids.device, len(ids)
    token = torch.arange(total, device=device)
    bounds = documents.bounds()
    start, limit = torch.zeros_like(token), torch.full_like(token, total)
    if bounds is not None:
        start, limit = bounds.long()
    seen = kinds != TEXT
    begins = seen & ((token == start) | (kinds != kinds.roll(1)))
    ends = seen & ((token + 1 == limit) | (kinds != kinds.roll(-1)))
    marker = torch.zeros_like(seen)
    for one in (*spec.image_ids, *spec.slice_ids, spec.newline_id):
        marker = marker | (ids == one)
    crops = _Crops(pictures, merge, spec, ids, kinds, start, begins, ends)

    other = torch.where(marker & ~seen, total, token).flip(0).cummin(0).values.flip(0)  # no marker, from here
    other = F.pad(other, (0, 1), value=total)
    last = crops.last.clamp(max=len(crops.number) - 1)
    frame_end = torch.minimum(other[crops.stop[last]], limit[crops.first])
    opened = torch.searchsorted(crops.opens, token, right=True) - 1
    frame = crops.frame[opened.clamp(min=0)]  # the latest one that has begun
    own = start[crops.first[frame]] == start
    inside = (opened >= 0) & own & (token < frame_end[frame])

    at_start = inside & (token == crops.opens[frame])
    step = torch.where(at_start, crops.advance[frame], (~inside).long())
    sums = F.pad(step.cumsum(0), (1, 0))
    origin = sums[torch.where(inside, crops.opens[frame], token)] - sums[start]
    crop = (begins.cumsum(0) - 1).clamp(0, len(crops.number) - 1)  # of the token, or the last one before it
    wrong = crops.wrong
    if documents.tree is not None:
        beginning, end = documents.tree.continued()
        origin, continues = origin + sums[end] - sums[beginning], end > beginning
        in_frame = continues & (token == start) & marker & inside[(end - 1).clamp(min=0)]
        slices = continues & begins & ~crops.is_slice[crop] & (ids.roll(1) == spec.slice_ids[0])
        wrong = wrong | in_frame.any() | slices.any()

    following = (crop + 1).clamp(max=len(crops.number) - 1)
    of_slice = crops.is_slice[crop] & (crops.frame[crop] == frame)
    closes = of_slice & (token == crops.stop[crop])
    opening = begins.roll(-1) & crops.is_slice[following] & (crops.frame[following] == frame)
    breaks = of_slice & crops.breaks[crop] & (token > crops.stop[crop]) & (token < crops.first[following] - 1)
    place = token - crops.first[crop]
    offsets = []
    for axis, size in enumerate((crops.height, crops.width)):
        at = place // crops.width[crop] if axis == 0 else place % crops.width[crop]
        stretched = _stretched(at, size[crop], crops.canvas[axis][crop])
        within = torch.where(crops.is_slice[crop], crops.corner[axis][crop] + at, stretched)
        d = torch.where(token == crops.stop[frame], crops.canvas[axis][frame], 0)
        d = torch.where(closes, crops.corner[axis][crop] + size[crop] - 1, d)
        d = torch.where(opening, crops.corner[axis][following], d)
        d = torch.where(breaks, crops.after_row[axis][crop], d)
        d = torch.where(at_start, -(origin > 0).long(), d)
        offsets.append(torch.where(inside, torch.where(seen, within, d), 0))
    return AxisPositions(torch.stack([origin, origin + offsets[0], origin + offsets[1]]), wrong)


class _Crops:
    """Images and slices, in the order of the text; each attribute [crops] on the device.

    Attributes:
        number: of the crop.
        first, stop: its first token, and the one after its last.
        height, width: in merged patches.
        is_slice: it belongs to the frame before it.
        frame, last: number of its frame's first and last crop.
        opens: the token before its frame.
        canvas: rows and columns of its frame's canvas.
        corner: of a slice, its first row and column on the canvas.
        breaks: a row of slices ends after it.
        after_row: offsets of the tokens there.
        advance: the positions that its frame takes.
    """

    def __init__(
        self,
        pictures: Pictures,
        merge: int,
        spec: CanvasSpec,
        ids: Tensor,
        kinds: Tensor,
        start: Tensor,
        begins: Tensor,
        ends: Tensor,
    ):
        count, total, device = len(pictures.grids), len(ids), ids.device
        self.number = number = torch.arange(count, device=device)
        self.first = torch.searchsorted(begins.cumsum(0), number + 1).clamp(max=total - 1)
        self.stop = (torch.searchsorted(ends.cumsum(0), number + 1) + 1).clamp(max=total)
        kind = kinds[self.first]
        is_image = kind == IMAGE
        given = torch.where(is_image, is_image.cumsum(0), pictures.images + (~is_image).cumsum(0)) - 1
        sizes = torch.tensor([(h // merge, w // merge) for _, h, w in pictures.grids], device="cpu")
        self.height, self.width = to_device(sizes, device)[given.clamp(0, count - 1)].unbind(1)
        same = (number > 0) & (start[self.first] == start[self.first.roll(1)])  # document as the one before
        self.is_slice = same & (ids[self.first - 1] == spec.slice_ids[0])
        self.frame = torch.where(self.is_slice, 0, number).cummax(0).values
        next_frame = torch.where(self.is_slice, count, number).roll(-1)
        next_frame = torch.where(number == count - 1, count, next_frame).flip(0).cummin(0).values.flip(0)
        self.last = next_frame - 1
        self.opens = self.first[self.frame] - 1
        self.wrong = (
            (begins.sum() != count)
            | ((begins & (kinds == IMAGE)).sum() != pictures.images)
            | (self.stop - self.first != self.height * self.width).any()
            | (self.first == start[self.first]).any()
            | (kind != kind[self.frame]).any()
        )
        following = (number + 1).clamp(max=count - 1)
        apart = self.first[following] - self.stop > 2  # more than the tokens that end and begin a slice
        self.breaks = self.is_slice & (self.last > number) & apart
        slices = self.last - self.frame
        breaks = torch.where(self.breaks, number, count).flip(0).cummin(0).values.flip(0)[self.frame]
        columns = torch.where(breaks <= self.last, breaks - self.frame, slices).clamp(min=1)
        rows = slices // columns
        columns = torch.where(rows * columns == slices, columns, slices).clamp(min=1)
        rows = slices // columns
        lead = (self.frame + 1).clamp(max=count - 1)
        height, width = self.height[lead], self.width[lead]
        place = number - self.frame - 1
        self.canvas = (
            torch.where(slices > 0, rows * height, self.height),
            torch.where(slices > 0, columns * width, self.width),
        )
        self.corner = (place // columns * height, place % columns * width)
        self.after_row = ((place // columns + 1) * height - 1, columns * width)
        self.advance = torch.maximum(*self.canvas) + 1


def _stretched(index: Tensor, size: Tensor, canvas: Tensor) -> Tensor:
    """The place of row `index` of `size` on a canvas, as torch.linspace on a CPU rounds it in float32."""
    last = canvas.float() - 1
    step = last / (size - 1).clamp(min=1).float()
    from_end = last - step * (size - 1 - index).float()
    at = torch.where(index < size // 2, step * index.float(), from_end)
    return torch.where(size > 1, at, 0).round().long()


def end_on_canvases(end: int, pictures: Pictures, merge: int) -> int:
    """Upper bound of the positions of text with pictures, for tokens that end at `end`: frames take fewer
    positions than tokens, unless the first slice is larger than the others.
    """
    sizes = [(h // merge, w // merge) for _, h, w in pictures.grids]
    largest = max(max(size) for size in sizes)
    return end + sum(max(0, largest - h * w) for h, w in sizes)


# -- every kind of positions


def axes_of(
    spec: TimeSpec | CanvasSpec | PlaceSpec,
    documents: Documents,
    kinds: Tensor,
    ids: Tensor,
    pictures: Pictures,
    merge: int,
    end: int,
) -> tuple[AxisPositions, int]:
    """Positions of tokens ids [T] of these kinds, and an upper bound, for tokens that end at `end`."""
    if isinstance(spec, CanvasSpec):
        axes = canvas_positions(documents, kinds, ids, pictures, merge, spec)
        return axes, end_on_canvases(end, pictures, merge)
    if isinstance(spec, PlaceSpec):
        return place_positions(documents, kinds, pictures, merge), end
    rate = spec.tokens_per_second
    pictures = pictures.steps_apart() if spec.steps_apart else pictures
    shared_frame = isinstance(spec, ClockSpec) and spec.shared_frame
    axes = axis_positions(documents, kinds, pictures, merge, rate, spec.past_time, shared_frame)
    return axes, end_of_positions(end, pictures, rate)
