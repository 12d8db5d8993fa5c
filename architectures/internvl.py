"""InternVL 3 (Zhu et al., 2025, arXiv:2504.10479): a vision-language model over image tiles of one size, with
LayerScale in the encoder; four patches make a token.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model, tower_layouts
from liger_models.architectures.encoders import internvl as encoder
from liger_models.architectures.encoders.parts import projector_activation, states_read
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import LayerNormSpec, MLPProjectorSpec, ModelSpec


def unread(c: HFConfig) -> tuple[str, ...]:
    """Layers after the one that is read, the unread final norm, and a pretraining token."""
    v = c.part("vision_config")
    depth, (read,) = v.take_count("num_hidden_layers", 24), states_read(c, v, -1)
    layers = tuple(f"*vision_tower.encoder.layer.{i}.*" for i in range(read, depth))
    return (
        *layers,
        *(("*vision_tower.layernorm.*",) if layers else ()),
        "*vision_tower.embeddings.mask_token",
    )


@register(
    "internvl",
    reference="InternVLForConditionalGeneration",
    vision=True,
    layouts=tower_layouts(
        encoder.NAMES,
        (("norm.", "layer_norm."),),
        permuted=(
            ("vision.encoder.table.weight", "1 p d -> (1 p) d"),
            ("vision.encoder.class_token.weight", "1 01 d -> (1 01 d)"),
        ),
    ),
    carried=unread,
)
def internvl(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    c.take_only(vision_feature_select_strategy="default")  # drops the class token
    for key in ("image_seq_length", "ignore_index"):
        c.take(key, None)  # of the processor, and of the loss, which is computed as everywhere
    states, ratio = states_read(c, v, -1), c.take_number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio else 0
    if len(states) != 1 or not merge or 1 / merge != ratio:
        raise ConfigError(
            f"{c.name}: of the encoder the states {states} are read, at a downsample_ratio of {ratio}; "
            "expected one state, and one over a whole number"
        )
    projector = MLPProjectorSpec(projector_activation(c), merge=merge, norm=LayerNormSpec(1e-5))
    image_id = c.take_count("image_token_id", 151667, least=0)
    return replace(text, vision=encoder.vision(v, projector, image_id, states[0]))


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
            "vision_config": {
                "norm_type": "rms_norm",
                "use_qk_norm": False,
                "attention_bias": False,
                "use_mean_pooling": True,
                "use_mask_token": True,
                "use_absolute_position_embeddings": False,
            },
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": False,
        }
    },
    skip={"field:SquarePictures.size": "squares of any size are taken, whose positions are stretched to it"},
)
