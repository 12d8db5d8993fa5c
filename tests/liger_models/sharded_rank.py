"""One rank of test_sharding.py: load checkpoints into sharded models, train a step, and save them.

Read FOLDER/NAME/source for each name, and write FOLDER/NAME/loaded and FOLDER/NAME/trained; also write
FOLDER/fresh_FAMILY, with fresh weights, and FOLDER/bytes{rank}.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from ranks import Count
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import CheckpointError, ConfigError


def results(folder: Path, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))

    def shard(model):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    counts = {}
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    for name in names:
        projections = "split" if name.endswith("split") else "fused"
        count = Count()
        with count:
            model = liger_models.from_hub(folder / name / "source", projections=projections, shard=shard)
        held = {p: p.to_local().numel() * p.itemsize for p in model.parameters()}
        held |= {b: b.numel() * b.itemsize for b in model.buffers()}
        counts[name] = {"read": count.nbytes, "held": sum(held.values())}
        model.save_pretrained(folder / name / "loaded")
        train_a_step(model)
        model.save_pretrained(folder / name / "trained", max_shard_size="20KB")
    for name in FRESH:
        torch.manual_seed(0)
        liger_models.from_config(fresh_config(name), shard=shard).save_pretrained(folder / f"fresh_{name}")
    source = folder / names[0] / "source"
    model = liger_models.from_hub(source, new_tokens=NEW_TOKENS, shard=shard)
    model.save_pretrained(folder / "new_tokens")
    try:
        model.resize_token_embeddings(200)
    except ConfigError as error:
        (folder / f"resized{rank}").write_text(str(error))
    (folder / f"bytes{rank}.json").write_text(json.dumps(counts))
    try:
        model.save_pretrained(folder / "taken")  # by a file, which only the first rank notices
    except CheckpointError as error:
        (folder / f"error{rank}").write_text(str(error))


FRESH = ("llama", "gpt_oss")
NEW_TOKENS = range(129, 137)


def fresh_config(family: str) -> dict[str, Any]:
    """Config with uneven numbers of rows, and with a padding row."""
    return {**find_architecture(family).tiny, "vocab_size": 133, "pad_token_id": 3}


def train_a_step(model) -> None:
    """Train a step on the same batch on every rank, so that the mean gradient equals each rank's exactly."""
    ids = torch.arange(14).view(2, 7)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
