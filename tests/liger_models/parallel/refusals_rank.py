"""One rank of test_refusals.py: the last rank has an invalid batch. Results: errors by wrapper and fault.

Models are native, or ours in transformers.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_models
from liger_models.convert.errors import DataError

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def make(kind: str) -> Any:
    if kind == "native":
        return liger_models.from_config(TINY, device="cpu")
    from transformers import LlamaConfig

    from liger_models.hf import classes_of

    return classes_of("llama").causal_lm(LlamaConfig(**TINY)).train()


def divide(model: Any) -> Any:
    for layer in model.layers if hasattr(model, "layers") else model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def results(folder: Path, rank: int, ranks: int, kind: str) -> dict[str, Any]:
    ids = torch.arange(12).view(2, 6)
    faults = {
        "an id": {"input_ids": ids + 100 * (rank == 1), "labels": ids},
        "a label": {"input_ids": ids, "labels": ids + 100 * (rank == 1)},
        "no label": {"input_ids": ids, "labels": ids.clone().fill_(-100) if rank == 1 else ids},
        "a shape": {"input_ids": ids, "labels": ids[:, : 6 - (rank == 1)]},
        "a mask": {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(2, 6 - (rank == 1))},
        "positions": {"input_ids": ids, "labels": ids, "position_ids": ids[:, : 6 - (rank == 1)]},
        "no batch": {"input_ids": ids[0] if rank == 1 else ids, "labels": ids},
        "nothing": {"input_ids": ids, "labels": ids},
    }
    found = {}
    for wrapper in ("ddp", "fsdp"):
        for fault, call in faults.items():
            torch.manual_seed(0)
            model = make(kind)
            wrapped: Any = DistributedDataParallel(model) if wrapper == "ddp" else divide(model)
            try:
                wrapped(**call).loss.backward()
                found[wrapper, fault] = ""
            except DataError as error:
                found[wrapper, fault] = str(error)
    return found
