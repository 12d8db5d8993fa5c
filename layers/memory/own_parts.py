"""Sizes of parameters: this process's part, the gathered tensor, and matrices in quantised bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import local_tensor
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.projections.stored_weight import dense_shape, kept_weights


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


def linear_matrices(modules: Iterable[nn.Module]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The matrices of linear layers, each once, with their shapes, as if none were in quantised bits."""
    every = (found for module in modules for found in matrices(module))
    found = {id(p): (p, dense_shape(module, name)) for module, name, p in every if p.ndim == 2}
    return list(found.values())


def decoded_bytes(part: nn.Module | None, itemsize: int) -> int:
    """Bytes of the largest matrix in quantised bits once it is decoded, or of all matrices of experts."""
    modules = () if part is None else part.modules()
    decoded = (sum(math.prod(kept.shape) for kept in kept_weights(m).values()) for m in modules)
    return itemsize * max(decoded, default=0)
