"""Every preset is a model, of the published size, and fits another tokenizer."""

import pytest

import liger_models
from liger_models.presets import PRESETS, preset

# As published with the models; the demonstration is ours.
PARAMETERS = {
    "llama-demo": 4000000,
    "llama-3.2-1b": 1235814400,
    "llama-3.1-8b": 8030261248,
    "llama-2-7b": 6738415616,
    "mistral-7b-v0.3": 7248023552,
    "granite-3.1-2b": 2533531648,
    "smollm3-3b": 3075098624,
    "olmo-3-7b": 7298011136,
    "gemma-4-e2b": 4_628_569_344,
    "phi-3.5-moe": 41873153344,
    "olmoe-1b-7b": 6919161856,
    "llama-4-scout": 107769861120,  # of the text part; computed
    "glm-4-9b": 9400279040,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_size(name):
    model = liger_models.from_config(preset(name), device="meta")
    assert model.num_parameters() == PARAMETERS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_a_small_tokenizer(name):
    model = liger_models.from_config(preset(name, vocab_size=300, eos=2), device="meta")
    assert model.embed_tokens.weight.shape[0] == 300
