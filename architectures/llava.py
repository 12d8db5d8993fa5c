"""LLaVA 1.5 (Liu et al., 2023, arXiv:2310.03744): a language model that sees images of one size, by the lower
layers of CLIP or SigLIP and two linear layers.
"""

from dataclasses import replace

from liger_models.architectures.common import activation
from liger_models.architectures.common.images import language_model
from liger_models.architectures.common.towers import (
    CLIP,
    SIGLIP,
    square_vision,
    states_read,
    tower,
    tower_layouts,
    unread_tensors,
)
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import MLPProjectorSpec, ModelSpec


def unread(c: HFConfig) -> tuple[str, ...]:
    """The layers behind those that are read, and their norm."""
    v = tower(c, [CLIP, SIGLIP])
    return unread_tensors(v.take_count("num_hidden_layers"), max(states_read(c, v, -2)))


TINY_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 7,
    "patch_size": 3,
    "layer_norm_eps": 2e-5,
}


@register(
    "llava",
    reference="LlavaForConditionalGeneration",
    tiny={
        "text_config": {"model_type": "llama"},
        "vision_config": TINY_CLIP,
        "image_token_index": 3,
    },
    layouts=tower_layouts(),
    carried=unread,
    variants={
        "siglip_several_layers": {
            "text_config": {"model_type": "mistral"},
            "vision_config": {"model_type": "siglip_vision_model"},
            "vision_feature_layer": [-2, 0, 1],
            "vision_feature_select_strategy": "full",
            "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        }
    },
)
def llava(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), tower(c, [CLIP, SIGLIP])
    states = states_read(c, v, -2)
    strategy = "default" if v.model_type == CLIP else "full"
    stated = c.take("vision_feature_select_strategy", "default")
    if stated != strategy:
        raise ConfigError(
            f"{c.name}: vision_feature_select_strategy is {stated!r}; beside a {v.model_type} it must be "
            f"{strategy!r}, by which a feature is made of every patch, and of nothing else"
        )
    c.take("image_seq_length", None)  # which the processor reads
    c.fill({"projector_hidden_act": "gelu"})
    projector = MLPProjectorSpec(
        activation(c, "projector_hidden_act", gated=False), c.take_flag("multimodal_projector_bias", True)
    )
    image_id = c.take_count("image_token_index", 32000, least=0)
    return replace(text, vision=square_vision(v, projector, image_id, states))
