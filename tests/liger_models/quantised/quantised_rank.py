"""One rank of test_sharded.py: load quantised checkpoints into sharded models, and save them.

For each NAME/source in FOLDER write NAME/ranks, where matrices are sharded by rows; NAME/as_loaded, quantised
as it was; and for experts NAME/inner, where each of them is sharded. Returns the bytes that were read, and
those of the tensors held, by name.
"""

from __future__ import annotations

from pathlib import Path

from ranks import Count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import liger_models


def results(folder: Path, rank: int, ranks: int) -> dict[str, tuple[int, int]]:
    mesh = init_device_mesh("cpu", (ranks,))

    def by_rows(model):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def within_experts(model):
        for layer in model.layers:
            place = lambda p: Shard(1) if p.dim() == 3 and p.shape[1] % ranks == 0 else None  # noqa: E731
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
        fully_shard(model, mesh=mesh)

    counts = {}
    for path in sorted(path for path in folder.iterdir() if (path / "source").is_dir()):
        with Count() as count:
            model = liger_models.from_hub(path / "source", shard=by_rows)
        held = sum(p.to_local().numel() * p.itemsize for p in model.parameters())
        counts[path.name] = count.nbytes, held
        model.save_pretrained(path / "ranks")
        model.save_pretrained(path / "as_loaded", quantization="as_loaded")
        if any(p.dim() == 3 for p in model.parameters()):
            liger_models.from_hub(path / "source", shard=within_experts).save_pretrained(path / "inner")
    return counts
