"""Layers that share attention and an MLP."""

import copy
from dataclasses import replace

import pytest

from liger_models.layers.memory import matrix_elements
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    SharedSpec,
    SSDSpec,
)

HIDDEN = 32
MAMBA = SSDSpec(4, 6, 2, 5, conv=3)
ATTENTION = AttentionSpec(4, 4, 16, 0.25)

ONE = BlockSpec(MAMBA, MLPSpec(40), NormSpec(), "shared_transformer", second_mixer=ATTENTION)


def model_of(*blocks):
    return CausalLM(ModelSpec(61, HIDDEN, blocks, NormSpec()))


def uses(*firsts, rank=3, **options):
    return tuple(
        replace(ONE, shared=SharedSpec(first, use, rank, **options)) for use, first in enumerate(firsts)
    )


def test_layers_share_one_parameter_each_and_copies_of_a_model_their_own():
    model = model_of(*uses(0, 1, 0))
    names = [name for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    first, second, third = (layer._shared[0] for layer in model.layers)
    assert first is third is not second
    other = copy.deepcopy(model)
    assert other.layers[2]._shared[0] is other.shared["0"].shared_transformer is not first


def test_shared_matrices_count_in_each_layer_that_uses_them():
    model = model_of(*uses(0, 0))
    one, other = (sum(matrix_elements(layer)) for layer in model.layers)
    shared = model.shared["0"].shared_transformer
    own = sum(p.numel() for p in model.layers[0].parameters() if p.ndim == 2 and p.shape[0] > 8)
    assert one == other >= own + shared.mlp.gate_up_proj.weight.numel() + 2 * HIDDEN * 3


@pytest.mark.parametrize(
    "blocks",
    [
        uses(1, 1),
        (*uses(0), replace(uses(0, 0)[1], mlp=replace(ONE.mlp, intermediate_size=9))),
        (*uses(0), replace(ONE, shared=SharedSpec(0, 1, 4))),
        uses(0) * 2,
    ],
    ids=["a first layer that is none", "another width", "another rank", "the same number"],
)
def test_layers_that_cannot_share_are_refused(blocks):
    with pytest.raises(ValueError, match=r"layers \[.*share the weights of layer"):
        model_of(*blocks)


def test_two_mixers_with_states_are_refused():
    with pytest.raises(ValueError, match="expected a mixer with a state, attention and an MLP"):
        model_of(replace(uses(0)[0], second_mixer=MAMBA))
