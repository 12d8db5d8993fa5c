"""The GPU for which a kernel's tiles and options are chosen: one record for each device."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Family = Literal["hopper", "a100", "desktop", "cdna", "rdna"]


class Gpu(NamedTuple):
    """A GPU's limits and abilities.

    Attributes:
        arch: its name in compilers, such as "sm_90" or "gfx942".
        capability: NVIDIA's compute capability; (0, 0) for AMD's GPUs, which number other architectures.
        shared_memory: bytes of shared memory available to a program.
        multiprocessors: their number.
        warp_size: threads of a warp.
        most_threads: of a program.
    """

    arch: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    warp_size: int = 32
    most_threads: int = 1024

    @property
    def amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def family(self) -> Family:
        """GPUs for which the same tiles are good: "hopper" is every data-centre GPU from Hopper on."""
        if self.amd:
            return "cdna" if self.warp_size == 64 else "rdna"
        if self.shared_memory >= 200 * 1024:
            return "hopper"
        return "a100" if self.shared_memory >= 160 * 1024 else "desktop"

    @property
    def matrix_units(self) -> bool:
        """Whether Triton and torch's fused attention use its matrix units, which then have bfloat16."""
        return self.amd or self.capability >= (8, 0)

    @property
    def starts_early(self) -> bool:
        """Whether it has programmatic dependent launch, and an engine that copies tiles (TMA)."""
        return self.capability >= (9, 0)

    @property
    def most_warps(self) -> int:
        return self.most_threads // self.warp_size


INTERPRETED = Gpu("sm_90", (9, 0), 227 * 1024, 2)
"""For the interpreter on a CPU: two multiprocessors, so that tests run more than one program."""


imagined: ContextVar[Gpu | None] = ContextVar("imagined", default=None)
"""The GPU on which tensors of the meta device are imagined to be (`_ahead.py`). Launches only compile."""


def on_gpu(x: Tensor) -> bool:
    """Whether x is on a GPU, or imagined there."""
    return x.is_cuda or (x.is_meta and imagined.get() is not None)


def gpu_of(x: Tensor) -> Gpu:
    """The record of x's GPU; on a CPU, `INTERPRETED`."""
    return gpu(x.device.index) if x.is_cuda else imagined.get() or INTERPRETED


@functools.cache
def gpu(device_index: int | None) -> Gpu:
    """The record of a GPU; None is the current one."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    # torch for ROCm has only the first name (pytorch 198198); there both are the same.
    shared = getattr(properties, "shared_memory_per_block_optin", None) or properties.shared_memory_per_block
    if torch.version.hip is not None:
        arch, capability = properties.gcnArchName.split(":")[0], (0, 0)
    else:
        arch, capability = f"sm_{properties.major}{properties.minor}", (properties.major, properties.minor)
    return Gpu(arch, capability, shared, properties.multi_processor_count, properties.warp_size)
