"""Distributed training of a model, on torch.distributed.

torch.distributed.init_process_group("nccl")
model = liger_models.from_hub("meta-llama/Llama-3.1-8B", shard=liger_models.parallelize)
model(input_ids, labels=input_ids).loss.backward()      # gradients are means over the processes

May import models and layers; training imports it.
"""

from liger_models.parallel.dims import Meshes, ParallelDims
from liger_models.parallel.sharding import parallelize

__all__ = ["Meshes", "ParallelDims", "parallelize"]
