"""A config that cannot be honoured is refused, and the message says what was found."""

import pytest

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError, UnsupportedModelError
from liger_models.convert.hf_config import HFConfig


def spec_of(model_type, **changes):
    architecture = find_architecture(model_type)
    raw = {key: value for key, value in {**architecture.tiny, **changes}.items() if value is not ...}
    return architecture.spec(HFConfig.load(raw))


@pytest.mark.parametrize("model_type", liger_models.list_architectures())
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is unknown; expected one of silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size 50 is not a multiple"),
        ({"head_dim": 15}, "even number of dimensions, found 15"),
        ({"vocab_size": ...}, "'vocab_size' is missing"),
        ({"attention_is_odd": 3}, "attention_is_odd"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(model_type, changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(model_type, **changes)


def test_an_unknown_model_type_shows_the_nearest():
    with pytest.raises(UnsupportedModelError, match=r"'lama' is not supported\. The nearest: llama"):
        liger_models.from_config({"model_type": "lama"})


def test_keys_that_a_mistral_config_leaves_out_have_the_reference_values():
    spec = spec_of("mistral", sliding_window=..., num_key_value_heads=..., num_attention_heads=8)
    attention = spec.blocks[0].attention
    assert (attention.window, attention.num_key_value_heads) == (4096, 8)
    assert spec_of("mistral", sliding_window=None).blocks[0].attention.window is None
