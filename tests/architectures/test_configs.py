"""A config that cannot be honoured is refused, and the message says what was found."""

import pytest

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, UnsupportedModelError


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
        ({"vocab_size": 0}, "vocab_size must be a whole number of 1 or more, found 0"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number of 1 or more, found '48'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number"),
        ({"intermediate_size": -3}, "intermediate_size must be a whole number"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings must be a whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number of 0 or more, found '1e-5'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ({"hidden_act": ["silu"]}, "hidden_act .'silu'. is unknown"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta of rope_parameters must be above 0"),
        ({"rope_parameters": {"rope_type": ["linear"], "factor": 2.0}}, "unknown rope type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            "short_factor must hold 8 numbers, found 1",
        ),
        ({"attention_is_odd": 3}, "attention_is_odd"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(model_type, changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(model_type, **changes)


def test_flags_and_windows_are_not_guessed_at():
    for family, changes in (
        ("llama", {"attention_bias": "false"}),
        ("llama", {"mlp_bias": 0}),
        ("mistral", {"sliding_window": 0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            spec_of(family, **changes)


def test_an_unknown_model_type_shows_the_nearest():
    with pytest.raises(UnsupportedModelError, match=r"'lama' is not supported\. The nearest: llama"):
        liger_models.from_config({"model_type": "lama"})


def test_keys_that_a_mistral_config_leaves_out_have_the_reference_values():
    spec = spec_of("mistral", sliding_window=..., num_key_value_heads=..., num_attention_heads=8)
    attention = spec.blocks[0].attention
    assert (attention.window, attention.num_key_value_heads) == (4096, 8)
    assert spec_of("mistral", sliding_window=None).blocks[0].attention.window is None
