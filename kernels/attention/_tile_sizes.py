"""Tile sizes of the kernels of `flash_attention.py`, by GPU and size of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._gpu import Family, gpu_of


class Tiles(NamedTuple):
    """Tile sizes and compilation options of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    forward: Tiles
    query_gradient: Tiles
    key_value_gradient: Tiles


_Table = dict[tuple[int, int], Configuration]

# By the largest head size of keys and of values, in 16 bits. For data-centre GPUs these are the fastest of
# several on an H200, spills included. The last one for heads of 64 and those for other GPUs are chosen from
# the compiler's reports (`python -m benchmarks devices`).
_HOPPER: _Table = {  # up to 197 KB of shared memory
    (64, 64): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 2)),
    (128, 128): Configuration(Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)),
    (192, 128): Configuration(Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(32, 128, 8, 2)),
    (256, 256): Configuration(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
    (512, 512): Configuration(Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
}
_BLACKWELL: _Table = {  # of data centres: with two stages, gradients of wide heads' keys spill there
    **_HOPPER,
    (192, 128): _HOPPER[192, 128]._replace(key_value_gradient=Tiles(32, 128, 8, 1)),
    (256, 256): _HOPPER[256, 256]._replace(key_value_gradient=Tiles(32, 64, 8, 1)),
}
_DESKTOP: _Table = {  # up to 99 KB
    (64, 64): _HOPPER[64, 64]._replace(key_value_gradient=Tiles(32, 128, 8, 2)),
    # The masks of their padded tiles take registers.
    (96, 96): Configuration(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
    (128, 128): Configuration(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 8, 2)),
    (256, 256): Configuration(Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    (512, 512): Configuration(*[Tiles(16, 16, 4, 1)] * 3),
}
_A100: _Table = {**_DESKTOP, (64, 64): _HOPPER[64, 64]}
_CDNA: _Table = {  # up to 64 KB, and warps of 64 threads
    (64, 64): Configuration(Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1), Tiles(64, 32, 4, 1)),
    (96, 96): Configuration(Tiles(64, 64, 8, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),  # padded
    (128, 128): Configuration(Tiles(64, 64, 8, 1), Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1)),
    (256, 256): Configuration(Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 1), Tiles(16, 32, 4, 1)),
    (512, 512): Configuration(*[Tiles(16, 16, 4, 1)] * 3),
}
_RDNA: _Table = {  # larger heads spill with all tiles that were tried
    (64, 64): Configuration(Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1), Tiles(32, 32, 8, 1)),
}
_OF_FAMILY: dict[Family, _Table] = {
    "hopper": _HOPPER,
    "a100": _A100,
    "desktop": _DESKTOP,
    "cdna": _CDNA,
    "rdna": _RDNA,
}
# Operands of float32 products must be in registers.
_FLOAT32: _Table = {
    (64, 64): Configuration(*[Tiles(32, 32, 8, 2)] * 3),
    (256, 256): Configuration(*[Tiles(16, 32, 8, 2)] * 3),
    (512, 512): Configuration(*[Tiles(16, 16, 8, 1)] * 3),
}
_FLOAT32_OF_FAMILY: dict[Family, _Table] = {
    "cdna": {  # up to 64 KB
        (64, 64): Configuration(*[Tiles(32, 32, 8, 1)] * 3),
        (256, 256): Configuration(*[Tiles(16, 16, 4, 1)] * 3),
        (512, 512): _FLOAT32[512, 512],
    },
    "rdna": {},
}


def find_tiles(q: Tensor, v: Tensor, blocks: bool = False) -> Configuration | None:
    """Tiles for heads of these sizes on q's GPU; None if none fit, on AMD's RDNA above 64 and in float32.

    blocks: whether queries see chosen blocks of keys only, whose masks take registers.
    """
    family, (major, _) = gpu_of(q).family, gpu_of(q).capability
    if q.dtype == torch.float32:
        table = _FLOAT32_OF_FAMILY.get(family, _FLOAT32)
    else:
        table = _BLACKWELL if major == 10 else _OF_FAMILY[family]
    sizes = (tiles for (keys, values), tiles in table.items() if q.shape[2] <= keys and v.shape[2] <= values)
    tiles = next(sizes, None)
    if blocks and tiles == _DESKTOP[128, 128] and major == 12:
        return tiles._replace(forward=Tiles(64, 64, 8, 2))
    return tiles


# Of `_compressed_kernels.py`, with heads of up to 512: `queries` is a number of heads.
_COMPRESSED: dict[Family, Configuration] = {
    "hopper": Configuration(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
    "a100": Configuration(Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(32, 32, 8, 1)),
    "desktop": Configuration(Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1)),
    "cdna": Configuration(Tiles(16, 32, 8, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1)),
}
# Data-centre Blackwell: Triton 3.7 gives Hopper's tiles more shared memory there than a program has.
_COMPRESSED_BLACKWELL = Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1))
_COMPRESSED_FLOAT32: dict[Family, Configuration] = {
    "hopper": Configuration(*[Tiles(16, 32, 8, 1)] * 3),
    "a100": Configuration(Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 32, 8, 1)),
    "desktop": Configuration(Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 32, 8, 1)),
    "cdna": Configuration(*[Tiles(16, 32, 8, 1)] * 3),
}


def find_compressed_tiles(q: Tensor) -> Configuration | None:
    """Tiles for attention to compressed keys on q's GPU; None if there are none, for heads above 512, on
    AMD's RDNA, and on NVIDIA's smaller GPUs in float32 for heads above 256, whose keys' gradients take 132
    KB.
    """
    family, wide = gpu_of(q).family, q.dtype == torch.float32
    if q.shape[2] > (256 if wide and family == "desktop" else 512):
        return None
    if gpu_of(q).capability[0] == 10 and not wide:
        return _COMPRESSED_BLACKWELL
    return (_COMPRESSED_FLOAT32 if wide else _COMPRESSED).get(family)
