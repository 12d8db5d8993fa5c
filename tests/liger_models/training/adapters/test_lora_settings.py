"""The settings of `--lora`: parsed, and refused before training."""

from __future__ import annotations

import sys

import pytest

from liger_models.convert.errors import ConfigError
from liger_models.training.adapters.lora_settings import LoraSettings

pytest.importorskip("peft")


def test_lora_settings_are_parsed():
    assert LoraSettings.parse("") == LoraSettings(16, None, "all-linear", 0.0)
    assert LoraSettings.parse("r=8, rslora").scaling_alpha == 16
    given = LoraSettings.parse("r=8,alpha=4,targets=q_proj+v_proj,dropout=0.1,dora")
    assert given == LoraSettings(8, 4.0, "q_proj+v_proj", 0.1, dora=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=4", "'rank=4' is not a setting"),
        ("r=four", "'r=four' is not a number"),
        ("r=4,r=8", "occurs twice"),
        ("dora=1", "'dora=1' is not a setting"),
        ("r", "'r' is not a setting"),
        ("r=0", "a rank of 1 or more"),
        ("dropout=1.0", "dropout from 0"),
        ("alpha=-2", "an alpha above 0"),
    ],
)
def test_errors_for_bad_settings_say_what_to_pass(text, message, settings):
    with pytest.raises(ConfigError, match=message):
        settings(lora=text)


def test_impossible_settings_are_reported_before_training(settings, run, monkeypatch):
    with pytest.raises(ConfigError, match="no linear layer is called 'query'; this model has down_proj, "):
        run(settings(lora="targets=query"))
    with pytest.raises(ConfigError, match="no linear layer is called 'lm_head'"):  # tied to the embedding
        run(settings(lora="targets=lm_head"))
    with pytest.raises(ConfigError, match="require lora"):
        settings(quantize="nf4")
    with pytest.raises(ConfigError, match="one of nf4, int8"):
        settings(lora="", quantize="fp4")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'liger_models\[quantize\]'"):
        run(settings(lora="", quantize="nf4"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'liger_models\[lora\]'"):  # before data are read
        run(settings(lora="", data=("nowhere.jsonl",)))
