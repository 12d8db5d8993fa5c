"""Create models from configs: accepted arguments, and the options shared by from_hub and from_config."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError
from liger_models.models.choosing import LoadOptions


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_the_config_of_a_model_creates_the_same_model(family):
    torch.manual_seed(0)
    model = liger_models.from_config(find_architecture(family).tiny, device="cpu")
    torch.manual_seed(0)
    again = liger_models.from_config(model.config, device="cpu")
    assert again.spec == model.spec
    assert again.config.to_dict() == model.config.to_dict()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_the_config_of_a_classifier_creates_a_classifier():
    rewards = liger_models.from_config(find_architecture("llama").tiny, labels=3, device="meta")
    again = liger_models.from_config(rewards.config, device="meta")
    assert type(again) is type(rewards)
    assert again.lm_head.out_features == 3


def test_a_config_is_not_shared_with_the_model_that_it_came_from():
    model = liger_models.from_config(find_architecture("llama").tiny, device="meta")
    again = liger_models.from_config(model.config, device="meta")
    again.config.rope_parameters["rope_theta"] = 1.0
    assert model.config.rope_parameters["rope_theta"] != 1.0


def test_a_preset_is_given_by_name():
    model = liger_models.from_config("llama-demo", device="meta")
    assert model.num_parameters() == 4_000_000


def test_a_folder_takes_precedence_over_a_preset_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = liger_models.from_config(find_architecture("llama").tiny, device="cpu")
    model.save_pretrained("llama-demo")
    assert liger_models.from_config("llama-demo", device="meta").spec == model.spec


@pytest.mark.parametrize("function", [liger_models.from_hub, liger_models.from_config])
def test_both_functions_take_all_options_with_the_same_defaults(function):
    named = inspect.signature(function).parameters
    assert {f.name: f.default for f in dataclasses.fields(LoadOptions)} == {
        f.name: named[f.name].default for f in dataclasses.fields(LoadOptions)
    }


@pytest.mark.parametrize("wrong", [{"device": "nowhere"}, {"projections": "halved"}])
def test_options_are_checked_before_the_folder(wrong, tmp_path):
    with pytest.raises(ConfigError, match=str(*wrong.values())):
        liger_models.from_hub(tmp_path / "missing", **wrong)


def test_options_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoadOptions().dtype = "float32"
