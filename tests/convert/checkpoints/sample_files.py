"""A weight map with every kind of expression, random tensors for it, and valid and broken files."""

import json
import struct

import torch
from safetensors.torch import save_file

from liger_models.convert.checkpoints.expressions import Cat, Ref, Stack
from liger_models.convert.checkpoints.reading import (
    INDEX_FILE,
)
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes, permuted

MAP = {
    "norm": Ref("norm.weight", (6,)),
    "qkv": Cat([Ref("q.weight", (8, 6)), Ref("k.weight", (2, 6)), Ref("v.weight", (2, 6))]),
    "experts": Stack([Cat([Ref(f"e{i}.gate", (3, 6)), Ref(f"e{i}.up", (3, 6))]) for i in range(4)]),
    "conv": permuted("conv.weight", (7, 5), "i o -> o i"),
    "empty": Ref("empty", (0, 6)),
    "scalar": Ref("scalar", ()),
}


def random_tensors(weight_map=MAP, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 50).to(dtype)
        for name, shape in checkpoint_shapes(weight_map).items()
    }


def write_sharded(folder, tensors, shards=3):
    """Write tensors in turn to `shards` files with an index, and return the index."""
    folder.mkdir(exist_ok=True)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    placed = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if placed[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return index


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
