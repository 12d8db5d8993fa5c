"""One rank of test_streaming.py: stream the weights of a sharded model, before and after a step.

Read FOLDER/source. Return what each stream yields, and the most bytes that gathered tensors had at once.
"""

from functools import partial
from pathlib import Path

import torch

import liger_models
from liger_models import ParallelDims, parallelize, stream_weights


def results(folder: Path, rank: int, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    dims = ParallelDims(experts=2)
    model = liger_models.from_hub(folder / "source", shard=partial(parallelize, mesh=dims))
    first = stream_weights(model, dtype="bfloat16", track=True)
    found = {"first": dict(first)}
    for p in (model.norm.weight, model.layers[1].mlp.experts.down_proj):
        if rank == 1:  # one process's shard changes, and all must notice
            part = p.to_local() if hasattr(p, "to_local") else p
            part.data += 1
    changed = stream_weights(model, dtype="bfloat16", since=first.token)
    found["changed"] = {name: x for bucket in changed.buckets("8KiB") for name, x in bucket.tensors.items()}
    found["none"] = dict(stream_weights(model, dtype="bfloat16", since=changed.token))
    found["float8"] = dict(stream_weights(model, quantization="fp8-block"))
    return found
