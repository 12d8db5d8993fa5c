"""MiniMax-M3 (MiniMax, 2026): its text part, and an encoder for images and videos of any size, whose time
steps attend to one another.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import minimax_m3 as encoder
from liger_models.architectures.minimax_m3_vl_text import RELEASED, SAVED, WHOLE
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "minimax_m3_vl",
    reference="MiniMaxM3SparseForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            (*RELEASED, ("lm_head.", "language_model.lm_head.")),
            root="language_model.model.",
            parts=(("vision.", Layout(encoder.RELEASED, root="")),),
        ),
        Layout(
            SAVED,
            WHOLE,
            root="model.language_model.",
            parts=(("vision.", Layout(encoder.NAMES, root="model.")),),
        ),
    ),
)
def minimax_m3_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    vision = encoder.vision(c, v)
    merged = text.hidden_size * vision.projector.merge**2
    c.take_only(merged_hidden_size=merged)
    return replace(text, vision=vision)


# -- tests

for_tests(
    "minimax_m3_vl",
    tiny={
        "text_config": {**find_architecture("minimax_m3_vl_text").tiny, "index_topk_blocks": 40},
        "vision_config": encoder.TINY,
        "image_token_index": 3,
        "video_token_index": 4,
        "projector_hidden_size": 28,
        "tie_word_embeddings": False,
    },
    skip={
        "published:config": "no copy was at hand",
        "padding:left": "with given positions the reference takes them for the places of keys",
    },
)
