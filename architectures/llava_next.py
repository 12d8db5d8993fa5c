"""LLaVA-NeXT, or LLaVA 1.6 (Liu et al., 2024, arXiv:2310.03744): LLaVA 1.5 for images of any size, as
tiles of one size.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import mlp_projector, states_read, tiles
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

KINDS = [clip.CLIP, clip.SIGLIP]
GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@register(
    "llava_next",
    reference="LlavaNextForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(),
    carried=lambda c: clip.unread_tensors(c, clip.tower(c, KINDS), -2),
)
def llava_next(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, KINDS)
    # Only CLIP has a class token to drop.
    c.take_only(vision_feature_select_strategy="default" if v.model_type == clip.CLIP else "full")
    c.take("use_image_newline_parameter", None)  # the reference always has one
    vision = clip.vision(
        v,
        mlp_projector(c),
        c.take_count("image_token_index", 32000, least=0),
        states_read(c, v, -2),
        tiles(c, v, GRIDS, None),
    )
    return replace(text, vision=vision)


# -- tests

for_tests(
    "llava_next",
    tiny={
        "text_config": {"model_type": "llama", "max_position_embeddings": 256},
        "vision_config": {**clip.TINY_CLIP, "image_size": 9},
        "image_token_index": 3,
        "vision_feature_select_strategy": "default",
        "image_grid_pinpoints": [[9, 9], [18, 9], [18, 18], [36, 9], [18, 36]],
    },
    variants={
        "siglip_several_layers": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": clip.SIGLIP},
            "vision_feature_layer": [-2, 0, 1],
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        }
    },
)
