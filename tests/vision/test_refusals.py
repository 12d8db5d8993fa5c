"""What models that see cannot do yet is refused by its name, and not done in another way."""

from __future__ import annotations

import pytest
import torch
from scenes import Image

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, DataError, UnsupportedModelError
from liger_models.text_part import text_config_of


def tiny(family: str, **changes: object) -> HFConfig:
    return HFConfig.load({**find_architecture(family).tiny, **changes})


def test_clip_gives_features_of_patches_alone():
    """ "full" would make one of its class token too."""
    config = tiny("llava", vision_feature_select_strategy="full")
    with pytest.raises(ConfigError, match="vision_feature_select_strategy is 'full'; beside a clip_vision"):
        find_architecture("llava").spec(config)


def test_a_text_part_whose_layers_read_images_is_no_model_by_itself():
    with pytest.raises(UnsupportedModelError, match="layers of a 'mllama' model read images"):
        text_config_of(tiny("mllama"))


@pytest.mark.parametrize("family", ["internvl", "gemma3", "llava", "paligemma", "llama4"])
def test_tiles_have_the_size_that_the_encoder_was_trained_with(family, make_pair):
    """Positions are stretched to no other size: the reference does so for InternVL alone."""
    pair = make_pair(family)
    call = pair.scene([1, Image(4, 4), 2])
    call["pixel_values"] = torch.nn.functional.pad(call["pixel_values"], (0, 3, 0, 3))
    side = pair.vision.pictures.size
    with pytest.raises(DataError, match=f"{side}, {side}"):
        pair.ours(**call)
