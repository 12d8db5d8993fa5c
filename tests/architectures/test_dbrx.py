"""DBRX's released files have `rope_theta` in `attn_config`, where transformers 5 does not compute with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairs import reference_class

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.models.verification import config_class

CONFIG = json.loads((Path(__file__).parent / "published/dbrx-base.json").read_text())["config"]
DBRX = find_architecture("dbrx")


def test_released_models_have_the_theta_that_they_were_trained_with():
    assert {block.mixer.rope.theta for block in DBRX.spec(HFConfig.load(CONFIG)).blocks} == {500000.0}


def test_the_other_theta_that_the_reference_adds_to_the_config_is_refused():
    reference_class(DBRX)  # or skip
    rewritten = config_class(DBRX)(**CONFIG).to_dict()
    with pytest.raises(ConfigError, match=r"rope_theta is 500000 in attn_config, but .* 10000"):
        DBRX.spec(HFConfig.load(rewritten))
    rewritten["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}  # as the message says
    assert DBRX.spec(HFConfig.load(rewritten)) == DBRX.spec(HFConfig.load(CONFIG))
