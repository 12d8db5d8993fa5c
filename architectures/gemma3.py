"""Gemma 3 (Gemma Team, 2025, arXiv:2503.19786): Gemma 3's text models with a SigLIP image encoder whose
patches are pooled; the tokens of one image attend to each other in both directions.
"""

import math
from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import LinearProjectorSpec, ModelSpec, NormSpec


@register(
    "gemma3",
    reference="Gemma3ForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(
        (("norm.", "mm_soft_emb_norm."), ("linear.weight", "mm_input_projection_weight")),
        permuted=(("vision.projector.linear.weight", "i o -> o i"),),
    ),
    carried=lambda c: clip.HEAD,
)
def gemma3(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, [clip.SIGLIP])
    norm = NormSpec(eps=v.take_number("layer_norm_eps"), offset=1.0, cast="gemma")
    tokens = c.take_count("mm_tokens_per_image", 256)
    side = v.take_count("image_size") // v.take_count("patch_size")
    merge = side // math.isqrt(tokens)
    if not merge or (side // merge) ** 2 != tokens:
        raise ConfigError(
            f"{c.name}: mm_tokens_per_image is {tokens}, to which {side} times {side} patches of an image "
            f"cannot be pooled; expected the square of {side} // n for a whole n"
        )
    for key in ("boi_token_index", "eoi_token_index"):
        c.take(key, None)  # placed by the processor
    image_id = c.take_count("image_token_index", 262144, least=0)
    vision = clip.vision(
        v, LinearProjectorSpec(merge, norm), image_id, kinds="token_type_ids", spans="images"
    )
    return replace(text, vision=vision)


# -- tests

for_tests(
    "gemma3",
    tiny={
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_act": ...,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "vision_config": {**clip.TINY_SIGLIP, "image_size": 16},
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
)
