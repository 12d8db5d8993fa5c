"""`liger-models list --missing`: each model type of transformers is supported, or its missing part named."""

from __future__ import annotations

import pytest
from older import installed_release

from liger_models.architectures import list_architectures
from liger_models.architectures.registry.multimodal import MULTIMODAL
from liger_models.architectures.registry.registry import ALIASES
from liger_models.architectures.registry.unsupported import MISSING
from liger_models.cli import main

LOOKED_AT = (5, 24)
"""Newest release of transformers whose tables were gone through."""


def test_no_causal_or_image_text_model_of_transformers_is_unaccounted_for():
    pytest.importorskip("transformers")
    if installed_release() > LOOKED_AT:
        pytest.skip(f"the table follows transformers {'.'.join(map(str, LOOKED_AT))}")
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    theirs = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    ours = {
        *list_architectures(),
        *list_architectures(vision=True, audio=True),
        *ALIASES,
        *MULTIMODAL,
        *MISSING,
    }
    assert theirs <= ours


def test_each_missing_family_is_listed_with_its_missing_part(capsys):
    assert main(["list", "--missing"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    listed = {words[0]: words[1] for words in lines if len(words) == 2}
    assert {name: listed.get(name) for name in MISSING} == dict(MISSING)
