"""One rank of test_ranks.py: the last rank has images that do not match its text.

The folder has task.pt. Models are native, or ours in transformers. The results are errors by family, wrapper
and fault.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models.convert.errors import DataError


def make(kind: str, config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    if kind == "native":
        return liger_models.from_config(config)
    from transformers import AutoConfig, AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).train()


def divide(model: Any) -> Any:
    decoder = model if hasattr(model, "layers") else model.base_decoder
    for layer in (*decoder.vision.encoder.layers, *decoder.layers):
        fully_shard(layer)
    return fully_shard(model)


def results(folder: Path, rank: int, ranks: int, kind: str) -> dict[str, Any]:
    task, found = torch.load(folder / "task.pt", weights_only=False), {}
    if kind == "transformers":
        import liger_models.hf

        liger_models.hf.register()
    for family, (config, checkpoint, right, faults) in task.items():
        for wrapper in ("ddp", "fsdp"):
            for fault, wrong in faults.items():
                model = make(kind, config, checkpoint)
                wrapped = DistributedDataParallel(model) if wrapper == "ddp" else divide(model)
                try:
                    wrapped(**(wrong if rank else right)).loss.backward()
                    found[family, wrapper, fault] = ""
                except DataError as error:
                    found[family, wrapper, fault] = str(error)
    return found
