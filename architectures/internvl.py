"""InternVL 3 (Zhu et al., 2025, arXiv:2504.10479): a vision-language model over image tiles of one size, with
LayerScale in the encoder; four patches make a token.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, tower_layouts
from liger_models.architectures.encoders import internvl as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "internvl",
    reference="InternVLForConditionalGeneration",
    vision=True,
    layouts=tower_layouts(
        encoder.NAMES,
        (("norm.", "layer_norm."),),
        permuted=encoder.PERMUTED,
    ),
    carried=lambda c: encoder.unread(c, "encoder.layer."),
)
def internvl(c: HFConfig) -> ModelSpec:
    return replace(language_model(c), vision=encoder.vision(c, c.part("vision_config")))


# -- tests

for_tests(
    "internvl",
    tiny={
        "text_config": {"model_type": "qwen2", "head_dim": ..., "hidden_size": 64},
        "vision_config": encoder.TINY,
        "image_token_id": 3,
    },
    variants={
        "lower_layer": {
            "text_config": {"model_type": "qwen3", "head_dim": 16},
            "vision_config": encoder.OTHER_FORM,
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
        }
    },
    skip={"field:SquarePictures.size": "squares of any size are taken, whose positions are stretched to it"},
)
