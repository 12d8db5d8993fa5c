"""LFM2-VL (Liquid AI, 2025, arXiv:2511.23404): LFM2 with SigLIP 2's encoder, for images of any size; four
patches make a token.
"""

from dataclasses import replace

from liger_models.architectures.common import liquid
from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import clip, siglip2
from liger_models.architectures.encoders.parts import projector_activation
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import LayerNormSpec, MLPProjectorSpec, ModelSpec

TEXT = (
    *(*liquid.NAMES, *liquid.EXPERTS, *liquid.PRE_NORM, *liquid.ATTENTION),
    ("model.language_model.norm.", "model.language_model.embedding_norm."),
)
OF_PROCESSOR = """
    do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles
    min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail
"""


@register(
    "lfm2_vl",
    reference="Lfm2VlForConditionalGeneration",
    vision=True,
    layouts=tuple(
        layout
        for inner in ("vision_model.", "")
        for layout in vision_layouts(
            {
                "vision.encoder.": (f"vision_tower.{inner}", clip.NAMES),
                "vision.projector.": ("multi_modal_projector.", (("norm.", "layer_norm."),)),
            },
            TEXT,
            permuted=siglip2.CHANNELS_LAST,
        )
    ),
    carried=lambda c: clip.HEAD,
    unread=dict.fromkeys(OF_PROCESSOR.split(), "read by the processor"),
)
def lfm2_vl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    c.take_only(vision_feature_layer=-1)
    projector = MLPProjectorSpec(
        projector_activation(c),
        c.take_flag("projector_bias", True),
        c.take_count("downsample_factor", 2),
        LayerNormSpec(1e-5) if c.take_flag("projector_use_layernorm", True) else None,
        c.take_count("projector_hidden_size", 2560),
    )
    image_id = c.take_count(("image_token_id", "image_token_index"), 396, least=0)
    vision = siglip2.vision(v, projector, image_id)
    return liquid.tied(c, replace(text, vision=vision))


# -- tests

for_tests(
    "lfm2_vl",
    tiny={
        "text_config": {**find_architecture("lfm2").tiny, "hidden_act": ..., "rms_norm_eps": ...},
        "vision_config": siglip2.TINY,
        "image_token_id": 3,
        "downsample_factor": 2,
        "projector_hidden_size": 28,
        "projector_hidden_act": "gelu",
        "projector_bias": True,
        "projector_use_layernorm": True,
        "tie_word_embeddings": False,
    },
    variants={
        "a token for each patch, without a norm": {
            "downsample_factor": 1,
            "projector_bias": False,
            "projector_use_layernorm": False,
            "tie_embedding": True,
        },
    },
)
