"""Patches of pictures in blocks and in rows, and functions of pictures of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def in_rows(x: Tensor, height: int, width: int, merge: int) -> Tensor:
    """Patches in blocks of merge^2, [P, D], of pictures of one size -> [pictures, height, width, D]."""
    x = x.reshape(-1, height // merge, width // merge, merge, merge, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, x.shape[-1])


def in_blocks(x: Tensor, merge: int) -> Tensor:
    """The inverse, [pictures, height, width, D] -> [P, D]."""
    blocks = x.unflatten(2, (-1, merge)).unflatten(1, (-1, merge))
    return blocks.transpose(2, 3).reshape(-1, x.shape[-1])


def by_size(
    x: Tensor, sizes: Sequence[tuple[int, int]], function: Callable[[Tensor, int, int], Tensor]
) -> Tensor:
    """A function of the patches of pictures, in one call for all of a size: x [P, D] -> [Q, D'].

    Args:
        sizes: height and width of each picture, in patches.
        function: of the patches of pictures of one size, the height and the width; returns equally many rows
            for each picture.
    """
    if len(set(sizes)) == 1:
        return function(x, *sizes[0])
    pictures = x.split([h * w for h, w in sizes])
    made: list[Tensor] = [x] * len(sizes)
    for size in dict.fromkeys(sizes):
        own = [i for i, other in enumerate(sizes) if other == size]
        rows = function(torch.cat([pictures[i] for i in own]), *size)
        for i, picture in zip(own, rows.chunk(len(own)), strict=True):
            made[i] = picture
    return torch.cat(made)
