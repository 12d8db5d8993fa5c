"""LLaVA-OneVision (Li et al., 2024, arXiv:2408.03326): Qwen2 with a SigLIP encoder, for images of any size as
tiles of one size, and for videos as frames.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import mlp_projector, states_read, tiles
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

STEPS = range(384, 2305, 384)


@register(
    "llava_onevision",
    reference="LlavaOnevisionForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(),
    carried=lambda c: clip.unread_tensors(c, clip.tower(c, [clip.SIGLIP]), -1),
)
def llava_onevision(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, [clip.SIGLIP])
    c.take_only(vision_feature_select_strategy="full", use_image_newline_parameter=True)
    vision = clip.vision(
        v,
        mlp_projector(c),
        c.take_count("image_token_index", 151646, least=0),
        states_read(c, v, -1),
        tiles(c, v, [[h, w] for h in STEPS for w in STEPS], _most_tiles(c)),
        video_id=c.take_count("video_token_index", 151647, least=0),
    )
    return replace(text, vision=vision)


def _most_tiles(c: HFConfig) -> int:
    ratio = c.take("vision_aspect_ratio", "anyres_max_9")
    most = str(ratio).removeprefix("anyres_max_")
    if not str(ratio).startswith("anyres_max_") or not most.isdecimal() or int(most) < 1:
        raise ConfigError(
            f"{c.name}: vision_aspect_ratio must be anyres_max_ and a number of tiles, found {ratio!r}"
        )
    return int(most)


# -- tests

for_tests(
    "llava_onevision",
    tiny={
        "text_config": {"model_type": "qwen2", "head_dim": ..., "hidden_size": 64},
        "vision_config": clip.TINY_SIGLIP,
        "image_token_index": 3,
        "video_token_index": 4,
        "image_grid_pinpoints": [[10, 10], [20, 10], [20, 20], [40, 10], [20, 40]],
        "vision_aspect_ratio": "anyres_max_2",
        "tie_word_embeddings": False,
    },
    variants={
        "several_layers": {
            "vision_feature_layer": [-2, 0],
            "vision_aspect_ratio": "anyres_max_9",
            "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        }
    },
)
