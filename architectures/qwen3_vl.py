"""Qwen3-VL (Bai et al., 2025, arXiv:2511.21631): Qwen3 with an encoder for images and videos of any size. The
position axes are interleaved over the pairs of a head, and features of the encoder's lower layers are added
in the language model.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, with_interleaved_axes
from liger_models.architectures.encoders.qwen import NAMES_3, TINY_3, stretched_vision
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec, VisionSpec

LAYOUT = Layout(
    root="model.language_model.",
    whole=("vision.encoder.layers.*.qkv_proj.*", "*.experts.*"),
    rename=((".router.", ".gate."),),
    parts=(("vision.", Layout(NAMES_3, root="model.visual.")),),
)


@register("qwen3_vl", reference="Qwen3VLForConditionalGeneration", vision=True, layouts=(LAYOUT,))
def qwen3_vl(c: HFConfig) -> ModelSpec:
    text = language_model(c)
    vision = deep_vision(c, text)
    return replace(with_interleaved_axes(c, text, (24, 20, 20)), vision=vision)


def deep_vision(c: HFConfig, text: ModelSpec) -> VisionSpec:
    """The encoder, from whose lower layers features are added in the first layers of the language model.

    Raises:
        ConfigError: more of these layers than the language model has.
    """
    v = c.part("vision_config")
    vision = stretched_vision(c, v, text.hidden_size)
    deep = tuple(v.take_layers("deepstack_visual_indexes", [8, 16, 24], among=len(vision.blocks)))
    if len(deep) > len(text.blocks):
        raise ConfigError(
            f"{v.name}: deepstack_visual_indexes is {list(deep)}; expected at most as many as the language "
            f"model has layers, {len(text.blocks)}"
        )
    return replace(vision, deep=deep)


# -- tests

TINY = {"image_token_id": 3, "video_token_id": 4, "tie_word_embeddings": False}

TINY_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

SKIP = {"field:TimeSpec.tokens_per_second": "each step of a video is a picture by itself"}

for_tests(
    "qwen3_vl",
    tiny={
        "text_config": {
            "model_type": "qwen3_vl_text",
            "rope_parameters": TINY_ROPE,
        },
        "vision_config": {"model_type": "qwen3_vl", **TINY_3},
        **TINY,
    },
    skip=SKIP,
)
