"""The GPUs to compile for, and the imitation of one.

The imitation is torch's, not the project's: tensors are on the meta device, so nothing is computed and
shapes cost nothing; `is_cuda` is true; the device's properties are the GPU's. The project therefore chooses
the kernels and tiles that it would choose there. The change to the process is permanent, and must be made
before the project is first imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

KB = 1024


class Target(NamedTuple):
    """A GPU to compile for.

    Attributes:
        example: GPUs of this architecture.
        capability: as torch reports it.
        shared_memory: bytes available to a program.
        multiprocessors: their number.
        warp_size: threads of a warp.
    """

    example: str
    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int
    warp_size: int = 32


# NVIDIA: CUDA C++ programming guide, table of compute capabilities. AMD: LLVM's AMDGPU guide, and torch for
# ROCm's capabilities, which repeat numbers of NVIDIA's.
TARGETS = {
    "sm_75": Target("T4", (7, 5), 64 * KB, 40),
    "sm_80": Target("A100", (8, 0), 163 * KB, 108),
    "sm_86": Target("RTX 3090, A10", (8, 6), 99 * KB, 82),
    "sm_89": Target("RTX 4090, L4, L40S", (8, 9), 99 * KB, 128),
    "sm_90": Target("H100, H200", (9, 0), 227 * KB, 132),
    "sm_100": Target("B200", (10, 0), 227 * KB, 148),
    "sm_120": Target("RTX 5090", (12, 0), 99 * KB, 170),
    "gfx90a": Target("MI250", (9, 0), 64 * KB, 104, 64),
    "gfx942": Target("MI300X", (9, 4), 64 * KB, 304, 64),
    "gfx950": Target("MI355X", (9, 5), 160 * KB, 256, 64),
    "gfx1100": Target("RX 7900", (11, 0), 64 * KB, 48),
    "gfx1201": Target("RX 9070", (12, 0), 64 * KB, 32),
}
MOST_THREADS = 1024  # of a program, on all of them
MOST_TENSOR_MEMORY = 512  # columns


def imitate(name: str) -> None:
    """Make torch of this process describe the GPU `name` from now on."""
    target, amd = TARGETS[name], name.startswith("gfx")
    version: Any = torch.version
    version.cuda, version.hip = (None, "7.0") if amd else ("13.0", None)
    properties = SimpleNamespace(
        name=target.example,
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.multiprocessors,
        warp_size=target.warp_size,
        total_memory=80 << 30,
        shared_memory_per_block=target.shared_memory if amd else 48 * KB,
    )
    if amd:
        properties.gcnArchName = f"{name}:sramecc+:xnack-"
    else:  # which torch for ROCm lacks
        properties.shared_memory_per_block_optin = target.shared_memory
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: None  # the index of the meta device
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: target.capability
    cuda.get_device_name = lambda device=None: target.example
    cuda.is_current_stream_capturing = lambda: False
    anything: Any = torch
    anything.Tensor.is_cuda = property(lambda x: True)
    anything._assert_async = lambda *_: None
    autocast = torch.is_autocast_enabled
    anything.is_autocast_enabled = lambda kind="cuda": kind != "meta" and autocast(kind)
    torch.set_default_device("meta")
