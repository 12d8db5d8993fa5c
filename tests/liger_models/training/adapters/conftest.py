"""Checkpoints of families for runs with adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture

sys.path.append(str(Path(__file__).parent))  # for peft_runs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer_folder):
    """Factory of checkpoints of a family with random parameters and the tokenizer."""

    def make(family):
        folder = tmp_path_factory.mktemp("family") / family
        tiny = {**find_architecture(family).tiny, "vocab_size": 320, "num_hidden_layers": 2}
        for per_layer in ("layer_types", "no_rope_layers", "moe_layers"):
            tiny.pop(per_layer, None)
        torch.manual_seed(1)
        model = liger_models.from_config(tiny, device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
        model.save_pretrained(folder)
        for file in tokenizer_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make
