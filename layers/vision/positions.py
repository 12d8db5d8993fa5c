"""Positions on three axes: time, row and column (M-RoPE; Qwen2-VL, arXiv:2409.12191, section 2.1).

A text token has the same position on all three axes, one after its predecessor. The tokens of a picture start
there too, at s:

    time = s + trunc(k * step),    row = s + i,    column = s + j

for the token of time step k, row i and column j of merged patches; `step` is 1 for an image. The token after
a picture is at s + max(rows, columns), or with `past_time` one after the largest of all three. A document
starts at 0, or after the document that it continues.

The tokens of a video and of its own sound alternate (TMRoPE, arXiv:2503.20215, section 2.2). Both start at s:
token k of the sound is at s + k on all axes. The token after them is one after the largest position of their
last token, as in the reference, even where the other part lasts longer.

Everything is computed on the device without synchronisation: the kinds of tokens are known only there.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.vision.pictures import Pictures

TEXT, IMAGE, VIDEO, SOUND = 0, 1, 2, 3
"""Kinds of tokens, as processors number them (`mm_token_type_ids`)."""


class AxisPositions(NamedTuple):
    """`axes` [3, T] int64; `wrong`, a bool on the device: pictures and token kinds do not match; `joint` [T]:
    marks the first token of each video whose tokens alternate with those of its sound, None: there is none.
    """

    axes: Tensor
    wrong: Tensor
    joint: Tensor | None = None


def axis_positions(
    documents: Documents,
    kinds: Tensor,
    pictures: Pictures,
    merge: int,
    tokens_per_second: float | None,
    past_time: bool = False,
    shared_frame: bool = False,
) -> AxisPositions:
    """The positions of tokens [T] of these kinds. `shared_frame`: see `ClockSpec`."""
    device, total = kinds.device, len(kinds)
    token = torch.arange(total, device=device)
    bounds = documents.bounds()
    document = torch.zeros_like(token) if bounds is None else bounds[0].long()  # its first token
    sound = kinds == SOUND
    group = torch.where(sound, VIDEO, kinds)  # a sound next to a video is the video's own
    begins = (token == document) | (group != group.roll(1))
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    first = torch.where(begins, token, 0).cummax(0).values  # of the token's group: text, or one picture
    last = torch.where(ends, token, total).flip(0).cummin(0).values.flip(0)
    table, times = _tables(pictures, merge, tokens_per_second, past_time)
    table, times = (to_device(x, device) for x in (table, times))

    number, wrong = torch.zeros_like(token), torch.zeros((), dtype=torch.bool, device=device)
    for kind, before, count in (
        (IMAGE, 0, pictures.images),
        (VIDEO, pictures.images, len(pictures.grids) - pictures.images),
    ):
        of_kind = kinds == kind
        ordinal = (begins & of_kind).cumsum(0)
        number = torch.where(of_kind, ordinal - 1 + before, number)
        wrong = wrong | (ordinal[-1] != count)
    size, rows, columns, taken, first_time = table[number.clamp(0, len(table) - 1)].unbind(1)
    # The tokens of pictures and of sounds in each group, and the place of each among its own.
    own = torch.stack([(kinds != TEXT) & ~sound, sound]).long()
    counted = own.cumsum(1)
    before_group = counted[:, first] - own[:, first]
    of_pictures, of_sounds = counted[:, last] - before_group
    among_pictures, among_sounds = counted - before_group - 1
    place = torch.where(sound, among_sounds, among_pictures)
    seen = of_pictures > 0
    joint = seen & (of_sounds > 0)
    wrong = wrong | (seen & ~sound & (of_pictures != size)).any()

    # Number of tokens minus positions of each picture, at its first token, and the running sum.
    taken = torch.where(joint & sound[last], of_sounds, taken)
    saved = torch.where(begins & seen, last + 1 - first - taken, 0)
    if shared_frame:  # the second token of a frame has the position of the first
        next_to_start = (begins & joint).roll(-1) & (token < total - 1)
        next_to_end = (ends & joint).roll(2) & (document.roll(2) == document) & (token > 1)
        saved = saved + next_to_start.long() + next_to_end.long()
    so_far = saved.cumsum(0)
    before_document = so_far[document] - saved[document]
    start = first - document - (so_far - torch.where(seen, saved[first], 0) - before_document)
    if documents.tree is not None:
        beginning, end = documents.tree.continued()
        sums = F.pad(so_far, (1, 0))
        start = start + end - beginning - (sums[end] - sums[beginning])
    step = place // (rows * columns)
    time = times[(first_time + step).clamp(0, len(times) - 1)]
    of_picture = torch.stack([time, place // columns % rows, place % columns])
    of_group = torch.where(sound, place, of_picture)
    return AxisPositions(start + torch.where(seen, of_group, token - first), wrong, begins & joint)


def place_positions(documents: Documents, kinds: Tensor, pictures: Pictures, merge: int) -> AxisPositions:
    """The positions of tokens [T] of these kinds as `PlaceSpec` describes them, on four axes."""
    device, total = kinds.device, len(kinds)
    token = torch.arange(total, device=device)
    bounds = documents.bounds()
    document = torch.zeros_like(token) if bounds is None else bounds[0].long()  # its first token
    seen = kinds == IMAGE
    begins = (token == document) | (kinds != kinds.roll(1))
    place = token - torch.where(begins, token, 0).cummax(0).values  # in the token's image
    starts = (begins & seen).long()
    so_far = starts.cumsum(0)
    sizes = [(h // merge, w // merge + 1) for _, h, w in pictures.grids]
    table = to_device(torch.tensor([(h * w + 2, w) for h, w in sizes], device="cpu"), device)
    size, columns = table[(so_far - 1).clamp(0, len(sizes) - 1)].unbind(1)
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    wrong = (so_far[-1] != len(sizes)) | (seen & ((place >= size) | (ends & (place != size - 1)))).any()
    count, number = token - document, so_far - 1 - (so_far - starts)[document]
    if documents.tree is not None:
        beginning, end = documents.tree.continued()
        sums = F.pad(so_far, (1, 0))
        count, number = count + end - beginning, number + sums[end] - sums[beginning]
    cell, inside = place - 1, seen & (place > 0) & (place < size - 1)
    of_image = torch.stack([cell % columns, cell // columns, number])
    return AxisPositions(torch.cat([count[None], torch.where(inside, of_image, count)]), wrong)


def end_of_positions(end: int, pictures: Pictures, tokens_per_second: float | None) -> int:
    """Upper bound of the positions of text with pictures, for tokens that end at `end`. (Pictures take fewer
    positions than tokens, except for slow videos.)
    """
    of_videos = zip(pictures.token_grids[pictures.images :], pictures.seconds, strict=True)
    return end + sum(
        max(0, int(t * (tokens_per_second or 1) * seconds) - t) for (t, _, _), seconds in of_videos
    )


def _tables(
    pictures: Pictures, merge: int, tokens_per_second: float | None, past_time: bool
) -> tuple[Tensor, Tensor]:
    """Per picture the tokens, rows, columns, positions and the start of its times, [pictures, 5]; and the
    times.
    """
    steps: list[float] = [1.0] * pictures.images
    steps += [1.0 if tokens_per_second is None else tokens_per_second * s for s in pictures.seconds]
    times = [
        (torch.arange(grid[0], device="cpu") * step).long()
        for grid, step in zip(pictures.token_grids, steps, strict=True)
    ]
    begin = itertools.accumulate((grid[0] for grid in pictures.token_grids), initial=0)
    taken = [
        max(h // merge, w // merge, 1 + int(own[-1]) if past_time else 0)
        for (_, h, w), own in zip(pictures.token_grids, times, strict=True)
    ]
    rows = [
        (t * h * w // merge**2, h // merge, w // merge, count, first)
        for (t, h, w), count, first in zip(pictures.token_grids, taken, begin, strict=False)
    ]
    return torch.tensor(rows, device="cpu"), torch.cat(times)
