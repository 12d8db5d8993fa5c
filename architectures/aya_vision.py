"""Aya Vision (Cohere, 2025, arXiv:2505.08751): Command R7B over tiles of images, with SigLIP's encoder and a
gated projector; four patches make a token. `cohere2_vision` is Command A Vision.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import states_read
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import GatedProjectorSpec, LayerNormSpec, ModelSpec


@register(
    "aya_vision",
    reference="AyaVisionForConditionalGeneration",
    vision=True,
    layouts=clip.layouts((("norm.", "layernorm."),)),
    carried=lambda c: clip.unread_tensors(c, c.part("vision_config"), -1),
)
def aya_vision(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), clip.tower(c, [clip.SIGLIP])
    c.take_only(vision_feature_select_strategy="full")  # there is no class token to drop
    size = c.take_count("alignment_intermediate_size", text.hidden_size)
    projector = GatedProjectorSpec(
        merge(c, v), size, LayerNormSpec(c.take_number("adapter_layer_norm_eps", 1e-6))
    )
    image_id = c.take_count("image_token_index", 255036, least=0)
    return replace(text, vision=clip.vision(v, projector, image_id, states_read(c, v, -1)))


@register(
    "cohere2_vision",
    reference="Cohere2VisionForConditionalGeneration",
    vision=True,
    layouts=clip.layouts(),
    carried=lambda c: clip.HEAD,
)
def cohere2_vision(c: HFConfig) -> ModelSpec:
    """Command A Vision (Cohere, 2025): Command A with the encoder's last output, normalised."""
    text, v = language_model(c), clip.tower(c, [clip.SIGLIP])
    projector = GatedProjectorSpec(merge(c, v), c.take_count("alignment_intermediate_size", 36864))
    image_id = c.take_count("image_token_id", 255036, least=0)
    return replace(text, vision=clip.vision(v, projector, image_id))


def merge(c: HFConfig, v: HFConfig) -> int:
    """Number of patches side by side that make a token.

    Raises:
        ConfigError: they do not divide an image.
    """
    factor, side = (
        c.take_count("downsample_factor", 2),
        v.take_count("image_size") // v.take_count("patch_size"),
    )
    if side % factor:
        raise ConfigError(
            f"{c.name}: downsample_factor is {factor}, and an image has {side} times {side} patches; "
            "expected a multiple"
        )
    return factor


# -- tests

for family, key in (("aya_vision", "image_token_index"), ("cohere2_vision", "image_token_id")):
    for_tests(
        family,
        tiny={
            "text_config": {
                "model_type": "cohere2",
                "logit_scale": 0.5,
                "layer_norm_eps": 2e-5,
                "rms_norm_eps": ...,
                "sliding_window": 7,
                "sliding_window_pattern": 2,
                "pad_token_id": 0,
            },
            "vision_config": {**clip.TINY_SIGLIP, "image_size": 13},
            key: 3,
            "alignment_intermediate_size": 40,
            "tie_word_embeddings": True,
            **({"adapter_layer_norm_eps": 2e-3} if family == "aya_vision" else {}),
        },
        skip={} if family == "aya_vision" else {"published:config": "its repository is not open"},
    )
