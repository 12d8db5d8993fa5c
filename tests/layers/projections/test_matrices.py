"""Which parameters are matrices is asked of the modules, not of the number of dimensions."""

from __future__ import annotations

import pytest

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.projections.matrices import matrices

VECTORS = {  # with two or more dimensions
    "gpt_oss": {"gate_up_proj_bias", "down_proj_bias"},  # one per expert
    "stablelm": {"weight"},  # one norm per head
    "llama": set(),
}


@pytest.mark.parametrize("family", VECTORS)
def test_vectors_per_expert_or_head_are_not_matrices(family):
    model = liger_models.from_config(find_architecture(family).tiny, device="meta")
    found = {id(p) for *_, p in matrices(model)}
    assert all(p.ndim >= 2 for *_, p in matrices(model))
    left_out = {
        name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in found
    }
    assert left_out == VECTORS[family]
