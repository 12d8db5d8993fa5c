"""Unsupported configs are refused, and the message states the value found."""

import contextlib
import copy
import functools
import itertools
import operator
import pickle
import re
from dataclasses import replace

import pytest
from pairs import ABSENT, spec_of
from variants import ROPES, accepts, flags, keys_without_effect, settings, skipped

import liger_models
from liger_models.architectures import find_architecture, list_architectures
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, LigerModelsError, UnsupportedModelError
from liger_models.layers.specs import AttentionSpec

# By name: changes of a family's tiny config, and the error message. A case applies to families whose tiny
# config has its keys; `skip={"refusal:partial_rotary_factor": "..."}` excludes a family.
REFUSED = {
    "hidden_act": ({"hidden_act": "relu6"}, "hidden_act 'relu6' is unknown; expected one of silu"),
    "hidden_act_list": ({"hidden_act": ["silu"]}, "hidden_act .'silu'. is unknown"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
    "head_dim_by_division": ({"head_dim": None, "hidden_size": 50}, "hidden_size 50 is not a multiple"),
    "odd_head_dim": ({"head_dim": 15}, "even number of dimensions, found (15|7)"),
    "vocab_size_missing": ({"vocab_size": ABSENT}, "'vocab_size' is missing"),
    "vocab_size": ({"vocab_size": 0}, "vocab_size must be a whole number of 1 or more, found 0"),
    "hidden_size": ({"hidden_size": "48"}, "hidden_size must be a whole number of 1 or more, found '48'"),
    "layers": ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number"),
    "negative_layers": ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number"),
    "heads_true": ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
    "kv_heads_zero": ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number"),
    "intermediate_size": ({"intermediate_size": -3}, "intermediate_size must be a whole number"),
    "positions": ({"max_position_embeddings": "64"}, "max_position_embeddings must be a whole number"),
    "window": ({"sliding_window": 0}, "sliding_window must be a whole number"),
    "eps": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number of 0 or more, found '1e-5'"),
    "eps_nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
    "tied": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
    "bias": ({"attention_bias": "false"}, "attention_bias must be true or false"),
    "mlp_bias": ({"mlp_bias": 0}, "mlp_bias must be true or false"),
    "theta": ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta of rope_parameters must be above 0"),
    "rope_type_list": (
        {"rope_parameters": {"rope_type": ["linear"], "factor": 2.0}},
        "unknown rope type",
    ),
    "rope_type": ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
    "partial_rotary_factor": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    "longrope_factors": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0],
                "long_factor": [1.0],
            }
        },
        r"short_factor must hold \d+ numbers, found 1",
    ),
    "no_scale": ({"attention_multiplier": 0}, "attention_multiplier must be a finite number above 0"),
    "no_logits": ({"logits_scaling": 0}, "logits_scaling must be a finite number above 0"),
    "no_queries": ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a finite number above 0"),
    "mrope": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "mrope_section",
    ),
}


def _needs(changes):
    """Keys that a family must have for the case to apply. A head's width also requires attention."""
    return {*changes, *(["num_attention_heads"] if "head_dim" in changes else [])}


@pytest.mark.parametrize("family", liger_models.list_architectures())
def test_every_unsupported_value_is_named(family):
    unnamed = {}
    for name, (changes, message) in REFUSED.items():
        if _needs(changes) <= find_architecture(family).tiny.keys() and not skipped(family, "refusal", name):
            try:
                spec_of(family, changes)
                found = "it is accepted"
            except ConfigError as error:
                found = str(error)
            if not re.search(message, found):
                unnamed[name] = found
    assert not unnamed


@pytest.mark.of_layers("settings")
@pytest.mark.parametrize("family", [*list_architectures(), *list_architectures(vision=True, audio=True)])
def test_a_value_of_another_type_causes_no_internal_error(family):
    """Any value of any key, in nested configs too, gives a spec or an error that names the key."""
    tiny = find_architecture(family).tiny
    for path, value in itertools.product(paths(tiny), ("x", [1], {}, -1, 2.5, True)):
        raw = copy.deepcopy(dict(tiny))
        functools.reduce(operator.getitem, path[:-1], raw)[path[-1]] = value
        with contextlib.suppress(LigerModelsError):
            config = HFConfig.load(raw)
            find_architecture(config.model_type).spec(config)


def paths(config):
    """The path to each key."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in paths(value))


@pytest.mark.of_layers("settings")
def test_a_case_that_a_registration_skips_would_be_tested_otherwise(family):
    """test_mutations.py checks this for fields, swapped tensors and norms."""
    tiny = find_architecture(family).tiny
    used = {
        "rope": lambda name: (
            name == "all" or any(rope == name or rope.startswith(f"{name}_") for rope in ROPES)
        ),
        "variant": lambda name: name in {**settings(family), **flags(family)},
        "absent": lambda name: name in tiny and accepts(family, {name: ABSENT}),
        "null": lambda name: name in tiny and accepts(family, {name: None}),
        "key": lambda name: name in keys_without_effect(family),
        "refusal": lambda name: name in REFUSED and accepts(family, REFUSED[name][0]),
        "field": lambda name: True,
        "swap": lambda name: True,
        "published": lambda name: name == "config",
        "rounding": lambda name: name == "norms",
        "positions": lambda name: name == "given",
        "padding": lambda name: name == "left",
        "norm": lambda name: True,
    }
    entries = [entry.partition(":") for entry in find_architecture(family).skip]
    needless = [entry for entry in entries if entry[0] not in used or not used[entry[0]](entry[2])]
    assert not needless, f"skip has entries that skip no test, or of unknown kinds: {needless}"


@pytest.mark.parametrize(
    ("family", "key", "known", "other"),
    [
        ("qwen3_moe", "use_qk_norm", True, False),
        ("qwen3_moe", "shared_expert_intermediate_size", 0, 32),
        ("phi3", "full_attn_mod", 1, 2),
        ("phi3", "interpolate_factor", 1, 4),
        ("nemotron", "kv_channels", 16, 24),
        ("dots1", "scoring_func", "noaux_tc", "softmax"),
    ],
)
def test_a_published_key_that_the_reference_ignores_must_have_its_known_value(family, key, known, other):
    assert spec_of(family, {key: known}) == spec_of(family, {})
    with pytest.raises(ConfigError, match=f"{key} must be .*{known!r}.* found {other!r}"):
        spec_of(family, {key: other})


def test_a_family_is_pickled_by_name(family):
    """Models refer to their family, and are sent to spawned processes."""
    architecture = find_architecture(family)
    assert pickle.loads(pickle.dumps(architecture)) is architecture
    changed = replace(architecture, carried=len)  # no longer the registered family
    assert pickle.loads(pickle.dumps(changed)).carried is len


def test_attention_is_bidirectional_throughout_or_refused(family):
    """Nearly every reference makes it so if its config has is_causal: false."""
    causal = spec_of(family, {})
    assert spec_of(family, {"is_causal": True}) == causal
    if "is_causal" in find_architecture(family).unread:
        assert spec_of(family, {"is_causal": False}) == causal
        return
    mixers = [mixer for block in causal.blocks for mixer in block.mixers]
    if any(not isinstance(mixer, AttentionSpec) or mixer.chunk for mixer in mixers):
        with pytest.raises(ConfigError, match="is_causal is false"):
            spec_of(family, {"is_causal": False})
        return
    spec = spec_of(family, {"is_causal": False})
    assert spec == spec_of(family, {"is_causal": None})
    assert not any(block.mixer.causal for block in spec.blocks)


def test_a_key_that_a_family_does_not_know_is_named(family):
    with pytest.raises(ConfigError, match="attention_is_odd"):
        spec_of(family, {"attention_is_odd": 3})


def test_an_unknown_model_type_is_refused_with_similar_ones():
    with pytest.raises(UnsupportedModelError, match=r"'lama' is not supported\. The nearest: llama"):
        liger_models.from_config({"model_type": "lama"})


def test_missing_keys_of_a_mistral_config_have_the_references_defaults():
    changes = {"sliding_window": ABSENT, "num_key_value_heads": ABSENT, "num_attention_heads": 8}
    spec = spec_of("mistral", changes)
    attention = spec.blocks[0].mixer
    assert (attention.window, attention.num_key_value_heads) == (4096, 8)
    assert spec_of("mistral", {"sliding_window": None}).blocks[0].mixer.window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_layer_config": {"full_attention": {"head_dim": 32}}},
            "some of the 4 layers, by their numbers",
        ),
        ({"per_layer_config": {"4": {"head_dim": 32}}}, "some of the 4 layers, by their numbers"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, "whole numbers for head_dim and"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; expected an earlier layer"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be 'vision'"),
    ],
)
def test_unsupported_settings_of_gemma_4_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of("gemma4_text", changes)
