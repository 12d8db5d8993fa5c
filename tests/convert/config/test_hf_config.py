"""Every key of a config.json is honoured, known to be harmless, or refused."""

import contextlib
import copy
import json

import pytest

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.model_config import ModelConfig, export_config
from liger_models.convert.errors import ConfigError

BASE = {"model_type": "llama", "max_position_embeddings": 4096, "rope_theta": 500000.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "truncate": False},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 8.0],
        "original_max_position_embeddings": 1024,
    },
    "llama3": LLAMA3,
}


def old_spelling(rope_type, spelling="rope_type"):
    return {
        **BASE,
        "rope_scaling": {spelling: rope_type, **SCALINGS[rope_type]},
        "partial_rotary_factor": 0.5,
    }


def new_spelling(rope_type):
    out = {key: value for key, value in BASE.items() if key != "rope_theta"}
    inside = {"rope_type": rope_type, "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    return {**out, "rope_parameters": {**inside, **SCALINGS[rope_type]}}


def rope(raw, *args, **kwargs):
    return HFConfig.load(raw).take_rope(*args, **kwargs)


# ------------------------------------------------------------------------------------- reading and taking


def test_load_reads_a_folder_a_file_and_a_dict_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", BASE):
        assert HFConfig.load(source).raw == BASE


def test_load_keeps_its_own_copy_of_a_dict():
    raw = copy.deepcopy(BASE)
    config = HFConfig.load(raw)
    raw["rope_theta"] = 1.0
    assert config.raw["rope_theta"] == 500000.0


@pytest.mark.parametrize("content", ["{not json", "[1, 2]", "\xff\xfe", None])
def test_load_names_the_file_that_is_not_a_json_object(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        HFConfig.load(tmp_path)


def test_a_missing_model_type_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="'model_type' is missing"):
        HFConfig.load({"hidden_size": 4})


def test_a_missing_required_key_is_named_with_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ConfigError, match=r"config\.json.*'hidden_size' is missing"):
        HFConfig.load(tmp_path).take("hidden_size")


def test_null_means_the_default_where_there_is_one():
    config = HFConfig.load({**BASE, "head_dim": None})
    assert config.take("head_dim", 64) == 64
    with pytest.raises(ConfigError, match="'head_dim' is null"):
        config.take("head_dim")


def test_two_names_of_one_setting_must_agree():
    config = HFConfig.load({**BASE, "num_experts": 8, "num_local_experts": 4})
    with pytest.raises(ConfigError, match="num_local_experts"):
        config.take_one_of("num_experts", "num_local_experts")
    assert HFConfig.load({**BASE, "num_experts": 8}).take_one_of("num_local_experts", "num_experts") == 8


# ----------------------------------------------------------------------------------------------- finish


def finish(**extra):
    config = HFConfig.load({**BASE, **extra}, ignore_config_keys=("let_through",))
    config.take_rope()
    config.take("max_position_embeddings")
    config.finish()


def test_finish_accepts_what_cannot_change_the_mathematics():
    finish(
        use_cache=True,
        torch_dtype="bfloat16",
        eos_token_id=[1, 2],
        attention_dropout=0.0,
        router_jitter_noise=0.0,
        pretraining_tp=1,
        is_llama_config=True,
        some_feature=False,
        other_feature=None,
        _private=3,
        let_through=7,
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("embedding_multiplier", 12.0, "ignore_config_keys"),
        ("attention_dropout", 0.1, "dropout is not supported"),
        ("router_jitter_noise", 0.01, "noise .* is not supported"),
        ("pretraining_tp", 2, "only 1 is supported"),
        ("quantization_config", {"bits": 4}, "quantised"),
        ("feature_that_is_zero", 0, "ignore_config_keys"),
    ],
)
def test_finish_names_a_key_that_nobody_took(key, value, reason):
    with pytest.raises(ConfigError, match=rf"(?s){key}.*{reason}"):
        finish(**{key: value})


def test_dropout_is_ignored_on_request():
    config = HFConfig.load({"model_type": "x", "attention_dropout": 0.1, "resid_pdrop": 0.2}, dropout=0.0)
    config.finish()
    config.with_raw({"model_type": "x", "embd_pdrop": 0.1}).finish()
    with pytest.raises(ConfigError, match=r"dropout is 0\.1; expected 0\.0"):
        HFConfig.load({"model_type": "x"}, dropout=0.1)


def test_finish_names_a_layer_type_whose_rotary_settings_nobody_took():
    nested = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "chunked")}
    config = HFConfig.load({"model_type": "x", "rope_parameters": nested})
    config.take_rope("full_attention")
    with pytest.raises(ConfigError, match=r"rope_parameters\.chunked"):
        config.finish()


# ---------------------------------------------------------------------------------------- rotary settings


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_old_and_new_spellings_of_one_model_are_equal(rope_type):
    expected = rope(new_spelling(rope_type))
    assert expected["rope_type"] == rope_type
    assert expected["rope_theta"] == 500000.0
    assert expected["partial_rotary_factor"] == 0.5
    assert rope(old_spelling(rope_type)) == expected
    assert rope(old_spelling(rope_type, "type")) == expected
    assert rope({**old_spelling(rope_type), **new_spelling(rope_type)}) == expected


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_rotary_settings_match_transformers(rope_type):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    for raw in (old_spelling(rope_type), new_spelling(rope_type)):
        reference = transformers.LlamaConfig(**sizes, **copy.deepcopy(raw)).rope_parameters
        ours = rope(raw)
        for key, value in reference.items():
            if key != "type":
                assert ours[key] == (tuple(value) if isinstance(value, list) else value), key


def test_missing_rotary_settings_get_their_defaults():
    assert rope({"model_type": "llama"}) == {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }
    assert rope({"model_type": "glm"}, head_dim_default_partial=0.5)["partial_rotary_factor"] == 0.5
    assert rope({"model_type": "x"}, default_theta=1e6)["rope_theta"] == 1e6
    yarn = rope({**BASE, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert yarn["original_max_position_embeddings"] == 4096
    assert (yarn["beta_fast"], yarn["beta_slow"], yarn["truncate"]) == (32.0, 1.0, True)
    assert (yarn["attention_factor"], yarn["mscale"], yarn["mscale_all_dim"]) == (None, None, None)


def test_the_original_length_at_the_top_level_wins_as_in_phi3():
    raw = old_spelling("longrope")
    del raw["rope_scaling"]["original_max_position_embeddings"]
    settings = rope({**raw, "original_max_position_embeddings": 512})
    assert settings["original_max_position_embeddings"] == 512
    assert settings["factor"] == 4096 / 512


def test_old_aliases_of_rope_types_are_accepted():
    raw = old_spelling("longrope")
    raw["rope_scaling"]["rope_type"] = "su"
    assert rope(raw) == rope(old_spelling("longrope"))
    mrope = rope({**BASE, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})
    assert mrope["rope_type"] == "default"
    assert mrope["mrope_section"] == (2, 3, 3)


def test_a_null_scaling_in_the_old_spelling_does_not_override_the_new_one():
    """TranslateGemma's configs have thetas in the old spelling and the scaling in the new one."""
    full = {"factor": 8.0, "rope_type": "linear"}
    settings = {"full_attention": full, "sliding_attention": {"rope_type": "default"}}
    thetas = {"rope_theta": 500.0, "rope_local_base_freq": 100.0}
    config = HFConfig.load({**BASE, **thetas, "rope_scaling": None, "rope_parameters": settings})
    full, sliding = (config.take_rope(layer_type) for layer_type in settings)
    assert (full["rope_type"], full["factor"], full["rope_theta"]) == ("linear", 8.0, 500.0)
    assert (sliding["rope_type"], sliding["rope_theta"]) == ("default", 100.0)


def test_settings_by_layer_type_are_read_in_both_spellings():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    new = {"model_type": "x", "rope_parameters": {"full_attention": full, "sliding_attention": local}}
    old = {
        "model_type": "x",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    for layer_type, expected in (("full_attention", full), ("sliding_attention", local)):
        assert rope(new, layer_type) == {**expected, "partial_rotary_factor": 1.0}
        assert rope(old, layer_type) == rope(new, layer_type) == rope({**old, **new}, layer_type)
    with pytest.raises(ConfigError, match="nested by layer type"):
        rope(new)
    with pytest.raises(ConfigError, match="no entry for the layer type 'chunked'"):
        rope(new, "chunked")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 10000.0}, "rope_theta is 10000.0 and 500000.0"),
        ({"rope_scaling": None}, "rope_type is 'default' and 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32.0}}, "factor is 32.0 and 8.0"),
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0 and 0.5"),
    ],
)
def test_spellings_that_disagree_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        rope({**old_spelling("llama3"), **new_spelling("llama3"), **change})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "ntk-aware"}, r"unknown rope type 'ntk-aware'; known are default, dynamic, linear"),
        ({"rope_type": "linear", "factor": 2.0, "wobble": 1}, "unknown key 'wobble'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "unknown key 'beta_fast'"),
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"rope_type": "linear", "factor": "2"}, "factor of rope_scaling must be a number, found '2'"),
        ({"rope_type": "linear", "factor": True}, "must be a number"),
        ({"rope_type": "linear", "factor": float("nan")}, "must be a number"),
        ({"rope_type": "linear", "factor": -2.0}, "must not be negative"),
        ({"rope_type": "linear", "factor": 0}, "factor of rope_scaling must be above 0"),
        ({"rope_type": "longrope", "short_factor": ["a"], "long_factor": [1.0]}, "must be a list of numbers"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "names two rope types"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 77},
            "beyond max_position_embeddings, 4096",
        ),
    ],
)
def test_rotary_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        rope({**BASE, "rope_scaling": settings})


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_settings_of_other_types_have_no_effect_on_the_default_type_and_warn(name):
    """transformers ignores them too; they are left over when the type of a config is changed."""
    left_over = {"factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 32}
    with pytest.warns(
        UserWarning, match="beta_fast, factor, original_max_position_embeddings have no effect"
    ):
        found = rope({**BASE, "rope_scaling": {name: "default", **left_over}})
    assert found == rope(BASE)
    for settings in (left_over, {name: "default", **left_over, "wobble": 1}):  # no type; an unknown key
        with pytest.raises(ConfigError, match="unknown keys"):
            rope({**BASE, "rope_scaling": settings})


@pytest.mark.parametrize("stated", [{"factor": 4.0}, {}])  # the ratio of the two lengths is 4, too
def test_longrope_with_an_attention_factor_equal_to_its_factor_is_refused(stated):
    """Such exports scale every score by the square of the factor, for Phi-3.5 by 1024 instead of 1.42."""
    raw = old_spelling("longrope")
    raw["rope_scaling"] |= {**stated, "attention_factor": 4}
    with pytest.raises(
        ConfigError, match=r"attention_factor 4, equal to the factor.*Remove attention_factor"
    ):
        rope(raw)
    raw["rope_scaling"]["attention_factor"] = 1.19
    assert rope(raw)["attention_factor"] == 1.19
    without_stretch = {"factor": 1.0, "attention_factor": 1.0}
    assert rope({**raw, "rope_scaling": raw["rope_scaling"] | without_stretch})["attention_factor"] == 1.0


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_theta": None},
        {"rope_theta": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": None}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": None}}},
    ],
)
def test_a_null_theta_is_not_replaced_by_the_default(raw):
    layer_type = "full_attention" if "full_attention" in raw.get("rope_parameters", ()) else None
    with pytest.raises(ConfigError, match=r"have no rope_theta; expected a number.*'rope_theta': \.\.\."):
        rope({"model_type": "llama", "max_position_embeddings": 4096, **raw}, layer_type)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model_type": 5}', '{"model_type": ["llama"]}'])
def test_a_file_that_is_not_a_config_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not valid JSON|model_type must be a name"):
        HFConfig.load(tmp_path)


# ------------------------------------------------------------------------------------ model.config and export


def test_model_config_is_a_mutable_namespace_over_a_copy():
    raw = {**BASE, "layer_types": ["full_attention"]}
    config = ModelConfig(raw)
    config.use_cache = False
    config.layer_types.append("sliding_attention")
    assert config.rope_theta == 500000.0
    assert config.to_dict() == {
        **BASE,
        "layer_types": ["full_attention", "sliding_attention"],
        "use_cache": False,
    }
    assert raw["layer_types"] == ["full_attention"]
    assert json.loads(config.to_json_string()) == config.to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    assert config.get_text_config(decoder=True) is config
    with pytest.raises(AttributeError, match="no_such_key"):
        config.no_such_key  # noqa: B018


def test_text_config_is_the_nested_one_and_shares_its_values():
    config = ModelConfig({"model_type": "vlm", "text_config": {"hidden_size": 8}})
    text = config.get_text_config()
    text.hidden_size = 16
    assert config.to_dict()["text_config"] == {"hidden_size": 16}


def test_a_config_that_was_read_is_exported_unchanged():
    raw = old_spelling("yarn")
    assert export_config(raw, dtype="bfloat16", source=True) == raw
    stated = {**raw, "torch_dtype": "float32"}
    assert export_config(stated, dtype="bfloat16", source=True) == {**raw, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("spelling", [old_spelling, new_spelling])
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_a_new_config_is_exported_in_both_spellings(spelling, rope_type):
    raw = spelling(rope_type)
    out = export_config(raw, dtype="bfloat16", source=False)
    assert out["dtype"] == out["torch_dtype"] == "bfloat16"
    assert out["rope_theta"] == out["rope_parameters"]["rope_theta"] == 500000.0
    assert out["rope_scaling"]["rope_type"] == rope_type
    for absent in (("rope_parameters",), ("rope_theta", "rope_scaling", "partial_rotary_factor"), ()):
        assert rope({key: value for key, value in out.items() if key not in absent}) == rope(raw)


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_transformers_reads_both_spellings_at_once_as_either_alone(rope_type):
    transformers = pytest.importorskip("transformers")
    raw = {"hidden_size": 64, "num_attention_heads": 4, **new_spelling(rope_type)}
    out = export_config(raw, dtype="bfloat16", source=False)
    expected = transformers.LlamaConfig(**copy.deepcopy(raw)).rope_parameters
    assert transformers.LlamaConfig(**out).rope_parameters == expected


def test_a_new_nested_config_is_exported_in_both_spellings():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    raw = {"model_type": "x", "rope_parameters": {"full_attention": full, "sliding_attention": local}}
    out = export_config(raw, dtype="float32", source=False)
    old_only = {key: value for key, value in out.items() if key != "rope_parameters"}
    for layer_type in ("full_attention", "sliding_attention"):
        assert rope(out, layer_type) == rope(old_only, layer_type) == rope(raw, layer_type)


def test_a_rope_type_newer_than_the_old_spelling_is_exported_only_in_the_new_one():
    """Gemma 4 has such a type; its text part may be saved as a checkpoint of its own."""
    transformers = pytest.importorskip("transformers")
    full, local = (
        {"rope_type": "proportional", "rope_theta": 1e6},
        {"rope_type": "default", "rope_theta": 1e4},
    )
    raw = {"model_type": "x", "rope_parameters": {"full_attention": full, "sliding_attention": local}}
    out = export_config(raw, dtype="float32", source=False)
    assert not out.keys() & {"rope_scaling", "rope_theta", "rope_local_base_freq"}
    assert transformers.Gemma4TextConfig(**out).rope_parameters == raw["rope_parameters"]


# ------------------------------------------------------------------------------- values of a wrong type

WRONG = ["4096", [4096], {"a": 1}, True, -1, 0, 4096.5, float("nan"), float("inf"), 10**400, "x" * 10_000]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("rope_type", ["yarn", "longrope", "dynamic", "llama3", "linear"])
def test_rotary_settings_of_a_wrong_type_are_config_errors(rope_type, wrong):
    """Every size in rotary settings, in both spellings, at the top level and nested."""
    for raw in (old_spelling(rope_type), new_spelling(rope_type)):
        inside = raw["rope_scaling"] if "rope_scaling" in raw else raw["rope_parameters"]
        places = [(raw, key) for key in ("max_position_embeddings", "rope_theta", "partial_rotary_factor")]
        places += [(raw, "original_max_position_embeddings"), (inside, "original_max_position_embeddings")]
        places += [(inside, key) for key in SCALINGS[rope_type]] + [(inside, "factor"), (raw, "rope_scaling")]
        for where, key in places:
            kept = dict(where)
            where[key] = wrong
            if key == "original_max_position_embeddings" and where is inside and rope_type != "linear":
                where.pop("factor", None)  # so that types that allow it use the ratio of the two lengths
            with contextlib.suppress(ConfigError):  # some are valid, such as a theta of 4096.5
                rope(raw)
            where.clear()
            where.update(kept)


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
@pytest.mark.parametrize("wrong", ["4096", [4096], 0, -4, True, 10**400, 4096.5], ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize("key", ["original_max_position_embeddings", "max_position_embeddings"])
def test_the_lengths_that_make_a_factor_are_checked_before_they_are_divided(rope_type, wrong, key):
    raw = new_spelling(rope_type)
    raw["rope_parameters"].pop("factor", None)
    raw[key] = wrong
    with pytest.raises(ConfigError, match=rf"{key}.* must "):
        rope(raw)


def test_a_nested_rotary_setting_that_is_not_an_object_is_a_config_error():
    raw = {**BASE, "rope_parameters": {"full_attention": 5, "sliding_attention": {"rope_theta": 1.0}}}
    with pytest.raises(ConfigError, match=r"full_attention.*must be an object"):
        rope(raw, "full_attention")
