"""Parallelism dimensions and their device meshes.

    processes = data_replicate * data_shard * sequence

| size             | its processes have                                                             |
|------------------|--------------------------------------------------------------------------------|
| `data_replicate` | different rows, and the same parameters                                        |
| `data_shard`     | different rows, and different shards of the parameters                         |
| `sequence`       | different tokens of the same rows, and different shards of the parameters      |
| `experts`        | different whole experts; formed from the data_shard * sequence processes       |

The last dimension varies fastest: processes of a sequence are adjacent, replicas are farthest apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_models.convert.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Numbers of processes per dimension. Sizes are 1 or more; `data_shard` may be -1: all remaining
    processes.

    Raises:
        ConfigError: an invalid size.
    """

    data_replicate: int = 1
    data_shard: int = -1
    sequence: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for size in fields(self):
            found = getattr(self, size.name)
            good = type(found) is int and (found >= 1 or (size.name == "data_shard" and found == -1))
            if not good:
                also = ", or -1 for all remaining processes" if size.name == "data_shard" else ""
                raise ConfigError(f"{size.name} is {found!r}; expected a whole number of 1 or more{also}")

    def resolve(self, processes: int) -> ParallelDims:
        """Sizes for this number of processes, with -1 resolved.

        Raises:
            ConfigError: their product is not the number of processes, or the experts do not divide the
            processes that
                share the parameters.
        """
        dims = self
        if dims.data_shard == -1:
            others = dims.data_replicate * dims.sequence
            if processes % others:
                raise ConfigError(
                    f"{processes} processes do not divide into data_replicate={dims.data_replicate} times "
                    f"sequence={dims.sequence}; expected a multiple of {others}"
                )
            dims = replace(dims, data_shard=processes // others)
        product = dims.data_replicate * dims.data_shard * dims.sequence
        if product != processes:
            raise ConfigError(
                f"data_replicate={dims.data_replicate} times data_shard={dims.data_shard} times "
                f"sequence={dims.sequence} is {product}, but there are {processes} processes"
            )
        if dims.shards % dims.experts:
            raise ConfigError(
                f"experts={dims.experts} must divide data_shard * sequence, which is {dims.shards}"
            )
        return dims

    @property
    def shards(self) -> int:
        """Number of processes that share one copy of the parameters."""
        return self.data_shard * self.sequence

    def meshes(self, device_type: str) -> Meshes:
        """Device meshes over all processes of the default process group; all of them must call this.

        Args:
            device_type: "cuda" or "cpu".

        Raises:
            ConfigError: as in `resolve`; or there is no process group.
        """
        dims = self.resolve(process_count())

        def mesh(sizes: dict[str, int], **options: Any) -> DeviceMesh:
            names = tuple(sizes)
            return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names, **options)

        data = {"replicate": dims.data_replicate, "shard": dims.shards}
        if dims.data_replicate == 1:
            del data["replicate"]
        sequence = experts = None
        if dims.sequence > 1:
            rows = dims.data_replicate * dims.data_shard
            sequence = mesh({"rows": rows, "sequence": dims.sequence})["sequence"]
        if dims.experts > 1:
            shard = dims.shards // dims.experts
            sizes = {"replicate": dims.data_replicate, "shard": shard, "experts": dims.experts}
            experts = mesh(sizes, **_urgent("experts", device_type))
        return Meshes(dims, mesh(data), sequence, experts)


def _urgent(dimension: str, device_type: str) -> dict[str, Any]:
    """Options of a mesh for NCCL collectives of high priority over one dimension. Their kernels start when
    any multiprocessor has finished a program, though a product that was launched later has programs waiting.
    """
    distributed: Any = torch.distributed
    if device_type != "cuda":
        return {}
    nccl = distributed.group.WORLD._get_backend(torch.device(device_type))
    if nccl.name() != "nccl":
        return {}
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = nccl.options._timeout
    return {"backend_override": {dimension: ("nccl", options)}}


@dataclass(frozen=True)
class Meshes:
    """Device meshes over the same processes.

    Attributes:
        dims: their sizes.
        data: the mesh that parameters are sharded and gradients averaged over: ("shard",), or ("replicate",
            "shard"). The processes of a sequence are part of "shard".
        sequence: ("sequence",), the processes that share this process's sequences; None for a size of 1.
        experts: ("replicate", "shard", "experts"); None for a size of 1.
    """

    dims: ParallelDims
    data: DeviceMesh
    sequence: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @property
    def device_type(self) -> str:
        return self.data.device_type


def meshes_of(mesh: DeviceMesh | ParallelDims | Meshes | None, device_type: str) -> Meshes:
    """Convert a torch device mesh, sizes, or None (all processes share everything) to Meshes.

    Raises:
        ConfigError: as in `ParallelDims.meshes`; or a torch device mesh with dimensions other than ("shard",)
        or
            ("replicate", "shard").
    """
    if isinstance(mesh, Meshes):
        return mesh
    if mesh is None or isinstance(mesh, ParallelDims):
        return (mesh or ParallelDims()).meshes(device_type)
    sizes, names = tuple(mesh.mesh.shape), mesh.mesh_dim_names
    expected = ("replicate", "shard")[-len(sizes) :]
    if len(sizes) > 2 or (len(sizes) == 2 and names is not None and names != expected):
        raise ConfigError(
            f"found a device mesh of {sizes} processes with the dimensions {names}; expected one dimension, "
            'or ("replicate", "shard"). For sequences and experts pass a ParallelDims'
        )
    return Meshes(ParallelDims(math.prod(sizes[:-1]), sizes[-1]), mesh)


def process_count() -> int:
    """Number of processes of the default process group.

    Raises:
        ConfigError: there is no process group.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "there is no process group: start the program with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    return distributed.get_world_size()
