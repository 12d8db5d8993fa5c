"""LLaVA-NeXT-Video (Zhang et al., 2024): LLaVA-NeXT that also accepts videos, with pooled frames."""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import mlp_projector, states_read, tiles
from liger_models.architectures.llava_next import GRIDS, KINDS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec


@register(
    "llava_next_video",
    reference="LlavaNextVideoForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(),
    carried=lambda c: clip.unread_tensors(c, clip.tower(c, KINDS), -2),
    fixed={"spatial_pool_mode": "average"},
    unread={
        "video_seq_length": "read by the processor",
        "use_image_newline_parameter": "the reference always has one",
    },
)
def llava_next_video(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, KINDS)
    # Only CLIP has a class token to drop.
    c.take_only(vision_feature_select_strategy="default" if v.model_type == clip.CLIP else "full")
    pool, side = (
        c.take_count("spatial_pool_stride", 2),
        v.take_count("image_size") // v.take_count("patch_size"),
    )
    if pool > side:
        raise ConfigError(
            f"{c.name}: spatial_pool_stride is {pool}, and a frame has {side} times {side} patches"
        )
    vision = clip.vision(
        v,
        mlp_projector(c),
        c.take_count("image_token_index", 32001, least=0),
        states_read(c, v, -2),
        tiles(c, v, GRIDS, None, pool),
        video_id=c.take_count("video_token_index", 32000, least=0),
    )
    return replace(text, vision=vision)


# -- tests

for_tests(
    "llava_next_video",
    tiny={
        "text_config": {"model_type": "llama", "max_position_embeddings": 256},
        "vision_config": {**clip.TINY_CLIP, "image_size": 15},
        "image_token_index": 3,
        "video_token_index": 4,
        "vision_feature_select_strategy": "default",
        "image_grid_pinpoints": [[15, 15], [45, 15], [30, 30]],
        "spatial_pool_stride": 2,
    },
    variants={
        "pooled by three": {
            "vision_config": {"model_type": clip.SIGLIP},
            "vision_feature_select_strategy": "full",
            "spatial_pool_stride": 3,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        }
    },
)
