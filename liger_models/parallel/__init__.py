"""Distributed training of a model, on torch.distributed.

May import models and layers; training imports it.
"""

from liger_models.parallel.dims import Meshes, ParallelDims
from liger_models.parallel.sharding import parallelize

__all__ = ["Meshes", "ParallelDims", "parallelize"]
