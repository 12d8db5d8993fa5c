"""Every preset makes a model of the published size, and can be resized for another tokenizer."""

import pytest

import liger_models
from liger_models.presets import PARAMETERS, PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_size(name):
    model = liger_models.from_config(preset(name), device="meta")
    assert model.num_parameters() == PARAMETERS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_resized_for_a_small_tokenizer(name):
    model = liger_models.from_config(preset(name, vocab_size=300, eos=2), device="meta")
    assert model.embed_tokens.weight.shape[0] == 300
