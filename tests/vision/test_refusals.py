"""Unsupported options of vision-language models raise errors that name them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scenes import Image

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, DataError
from liger_models.layers.model.causal_lm import CausalLM


def tiny(family: str, **changes: object) -> HFConfig:
    return HFConfig.load({**find_architecture(family).tiny, **changes})


def test_dropping_the_class_token_of_an_encoder_without_one_is_refused():
    """The reference would drop the first patch."""
    siglip = {**find_architecture("llava").tiny["vision_config"], "model_type": "siglip_vision_model"}
    config = tiny("llava", vision_config=siglip)
    with pytest.raises(ConfigError, match="strategy is 'default'; with a siglip_vision_model it must be 'f"):
        find_architecture("llava").spec(config)


def test_a_class_feature_with_merged_patches_is_refused():
    spec = find_architecture("internvl").spec(tiny("internvl"))
    vision = dataclasses.replace(spec.vision, class_feature=True)
    with pytest.raises(ValueError, match="whose projector merges no patches"), torch.device("meta"):
        CausalLM(dataclasses.replace(spec, vision=vision))


@pytest.mark.parametrize("family", ["internvl", "gemma3", "llava", "paligemma", "llama4"])
def test_tiles_must_have_the_size_that_the_encoder_was_trained_with(family, make_pair):
    """Positions are not interpolated to other sizes, except to squares of whole patch blocks in InternVL."""
    pair = make_pair(family)
    call = pair.scene([1, Image(4, 4), 2])
    call["pixel_values"] = torch.nn.functional.pad(call["pixel_values"], (0, 3, 0, 3))
    side = pair.vision.pictures.size
    with pytest.raises(DataError, match=f"{side}, {side}"):
        pair.ours(**call)
