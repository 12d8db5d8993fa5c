"""DeepSeek-V4 in calls that the tests of all families do not make."""

from __future__ import annotations

import pytest
import torch
from pairs import make_pair
from safetensors.torch import load_file, save_file

import liger_models
from liger_models.convert.errors import DataError
from liger_models.layers.recompute.activation_memory import LEVELS

BOUNDS = torch.tensor([0, 7, 8, 19, 31])  # a document shorter than each compressed key, and longer ones


def test_every_level_of_activation_memory_gives_the_same_bits():
    pair = make_pair("deepseek_v4")
    batch = pair.clear(lambda: {**pair.batch(rows=1, length=31), "cu_seqlens": BOUNDS})
    results = []
    for level in LEVELS:
        pair.ours.set_activation_memory(level)
        results.append(pair.run_ours(**batch))
    assert all(torch.equal(run.loss, results[0].loss) for run in results)
    for name, gradient in results[0].gradients.items():
        assert all(torch.equal(run.gradients[name], gradient) for run in results), name


def test_a_table_of_experts_that_there_are_not_is_refused(tmp_path):
    pair = make_pair("deepseek_v4")
    pair.reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.ffn.gate.tid2eid"][5, 1] = 8
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="tid2eid names the expert 8; expected 0 to 7"):
        liger_models.from_hub(tmp_path)(torch.tensor([[1, 2]]))
