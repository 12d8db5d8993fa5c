"""Experts of LongCat-Flash that return their input.

transformers stores gate_proj and up_proj of these experts, too, without reading them, and then cannot read
released checkpoints, which do not have them. So its model is compared without these matrices.
"""

from __future__ import annotations

import pairs
import pytest
import torch
from pairs import beyond_bound, make_pair
from safetensors.torch import load_file
from torch import nn

import liger_models
from liger_models.layers.experts.router import Router

SOME = {"zero_expert_num": 3}


def as_released(reference):
    for layer in reference.model.layers:
        experts = layer.mlp.experts
        stored = experts.gate_up_proj.detach()[: experts.num_routed_experts]
        experts.gate_up_proj = nn.Parameter(stored.clone())
    return reference


@pytest.fixture
def pair(monkeypatch):
    made = pairs.reference_model
    monkeypatch.setattr(pairs, "reference_model", lambda *given: as_released(made(*given)))
    return make_pair("longcat_flash", SOME)


def test_experts_that_return_their_input_agree(pair):
    chosen = []
    for router in (module for module in pair.ours.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda module, _, output: chosen.append(output[2]))
    assert not beyond_bound(pair.distances(**pair.batch()))
    assert all((experts >= 6).any() and (experts < 6).any() for experts in chosen)


@pytest.mark.parametrize("released", [True, False])
def test_a_checkpoint_is_read_and_comes_back_with_and_without_matrices_that_nobody_reads(released, tmp_path):
    architecture = pairs.find_architecture("longcat_flash")
    config = pairs.changed(architecture.tiny, SOME)
    reference = pairs.reference_model(architecture, config)
    (as_released(reference) if released else reference).save_pretrained(tmp_path / "theirs")
    model = liger_models.from_hub(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert any(".experts.6." in name for name in before) != released
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
