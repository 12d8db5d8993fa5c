"""LLaVA 1.5 (Liu et al., 2023, arXiv:2310.03744): a vision-language model over images of one size, with the
lower layers of CLIP or SigLIP and two linear layers; or over images of any size, with Pixtral's encoder
(arXiv:2410.07073).
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import clip, pixtral
from liger_models.architectures.encoders.parts import mlp_projector, states_read
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

NAMES = (*pixtral.NAMES, ("projector.", "multi_modal_projector."))


def encoder(c: HFConfig) -> HFConfig:
    """Config of the encoder: one of three kinds."""
    v = c.part("vision_config")
    if v.model_type != pixtral.PIXTRAL:
        return clip.tower(c, [clip.CLIP, clip.SIGLIP])
    c.take_only(ignore_index=-100)
    v.fill({"num_hidden_layers": 24})
    return v


@register(
    "llava",
    reference="LlavaForConditionalGeneration",
    vision=True,
    layouts=(*clip.layouts(), *vision_layouts({"vision.": ("", NAMES)})),
    carried=lambda c: clip.unread_tensors(c, encoder(c), -2),
)
def llava(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), encoder(c)
    states = states_read(c, v, -2)
    stated = c.take("vision_feature_select_strategy", "default")
    # Only CLIP has a class token to drop.
    known = ("default", "full") if v.model_type == clip.CLIP else ("full",)
    if stated not in known:
        raise ConfigError(
            f"{c.name}: vision_feature_select_strategy is {stated!r}; with a {v.model_type} it must be "
            f"{' or '.join(map(repr, known))}: a feature is made of every patch, and with 'full' of a class "
            "token that there may be"
        )
    image_id = c.take_count("image_token_index", 32000, least=0)
    if v.model_type == pixtral.PIXTRAL:
        return replace(text, vision=pixtral.vision(v, mlp_projector(c), image_id, states))
    both = v.model_type == clip.CLIP and stated == "full"
    return replace(text, vision=clip.vision(v, mlp_projector(c), image_id, states, class_feature=both))


# -- tests

for_tests(
    "llava",
    tiny={
        "text_config": {"model_type": "llama"},
        "vision_config": clip.TINY_CLIP,
        "image_token_index": 3,
    },
    variants={
        "class_feature": {"vision_feature_select_strategy": "full"},
        "siglip_several_layers": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": "siglip_vision_model"},
            "vision_feature_layer": [-2, 0, 1],
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        },
        "pixtral": {
            "text_config": {"model_type": "mistral", "max_position_embeddings": 256},
            "vision_config": {"model_type": pixtral.PIXTRAL, "layer_norm_eps": ...},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "pixtral_several_layers": {
            "text_config": {"max_position_embeddings": 256},
            "vision_config": {"model_type": pixtral.PIXTRAL, "layer_norm_eps": ...},
            "vision_feature_layer": [-2, 1],
            "vision_feature_select_strategy": "full",
        },
    },
)
