"""Sizes of a parameter: this process's part, and the gathered tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_models.convert.checkpoints.shards import local_tensor


def own_bytes(p: Tensor) -> int:
    """Bytes of this process's part."""
    return local_tensor(p).nbytes


def own_elements(p: Tensor) -> int:
    """Elements of this process's part."""
    return local_tensor(p).numel()


def gathered_bytes(p: Tensor) -> int:
    """Bytes of a parameter gathered for use. Experts sharded by expert parallelism are never gathered beyond
    this process's experts.
    """
    mesh: Any = getattr(p, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "experts" not in names:
        return p.nbytes
    return 0 if len(names) == 1 else p.nbytes // mesh.size(names.index("experts"))


def whole_bytes(p: Tensor) -> int:
    """Bytes of a gradient when computed: in full for gathered parameters, else this process's part."""
    return max(gathered_bytes(p), own_bytes(p))
