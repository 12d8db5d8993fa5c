"""Configs that create our models: transformers' own, overridden settings, and keys that no family reads."""

from __future__ import annotations

import pytest
import torch

from liger_models.convert.errors import ConfigError

transformers = pytest.importorskip("transformers")


def test_a_config_of_transformers_own_model_creates_ours_too(make_both, hf):
    """By then the config has a setting for how transformers runs the experts."""
    both = make_both("qwen3_moe")
    config = both.reference.config
    config._experts_implementation = "grouped_mm"
    assert isinstance(transformers.AutoModelForCausalLM.from_config(config), hf.LigerForCausalLM)
    assert isinstance(hf.classes_of("qwen3_moe").causal_lm(config), hf.LigerForCausalLM)


@pytest.mark.parametrize(
    ("family", "given", "lost"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
        ("llama", {"rope_parameters": None}, "rope_theta"),
        ("glm", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_that_override_the_checkpoints_and_lack_a_key_are_refused(
    family, given, lost, make_both
):
    folder = make_both(family).folder
    with pytest.raises(ConfigError, match=f"have no {lost}"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **given)


def test_rotary_settings_that_override_the_checkpoints_and_repeat_its_theta_are_accepted(make_both):
    folder = make_both("llama").folder
    given = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    for name in ("rope_scaling", "rope_parameters"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **{name: dict(given)})
        rope = model.model.spec.blocks[0].mixer.rope
        assert (rope.type, rope.factor, rope.theta) == ("linear", 4.0, 5e5)


@pytest.mark.parametrize("task", ["", "CausalLM", "SequenceClassification"])
def test_unknown_config_keys_are_ignored_through_the_auto_classes(task, make_both, batch):
    both = make_both("llama", task, pad_token_id=0)
    del batch["labels"]
    expected = both.ours(**batch)[0]
    both.ours.config.wobble = 1.5
    both.ours.save_pretrained(both.folder)
    auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
    with pytest.raises(ConfigError, match=r"ignore_config_keys=\('wobble',\)"):
        auto.from_pretrained(both.folder)
    again = auto.from_pretrained(both.folder, ignore_config_keys=("wobble",)).eval()
    assert torch.equal(again(**batch)[0], expected)
    made = auto.from_config(again.config, ignore_config_keys=("wobble",)).eval()
    made.load_state_dict(again.state_dict())
    assert torch.equal(made(**batch)[0], expected)


def test_attributes_that_tools_set_on_configs_are_ignored(make_both, hf):
    config = make_both("llama").ours.config
    config.neftune_noise_alpha, config.is_decoder, config.language = 5.0, True, "en"
    assert isinstance(transformers.AutoModelForCausalLM.from_config(config), hf.LigerForCausalLM)
