"""Mistral Small 3.1 (Mistral AI, 2025): Mistral, Ministral 3 or Mistral Small 4 with Pixtral's encoder
(arXiv:2410.07073), for images of any size.
"""

from dataclasses import replace

from liger_models.architectures import ministral3, mistral4  # noqa: F401  (whose configs the variants take)
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import pixtral
from liger_models.architectures.encoders.parts import projector_activation, states_read
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import MistralMergerSpec, ModelSpec

NAMES = (
    *pixtral.NAMES,
    ("projector.merging_layer.", "projector.patch_merger.merging_layer."),
    ("projector.", "multi_modal_projector."),
)
EXPERTS = (SHARED_EXPERTS, (".router.", ".gate."))  # of Mistral Small 4


def state(c: HFConfig, v: HFConfig) -> int:
    """The encoder's layer, counted from 1, whose output the projector receives.

    Raises:
        ConfigError: none, or several, which the reference's norm does not take.
    """
    v.fill({"num_hidden_layers": 24})
    states = states_read(c, v, -1)
    if len(states) != 1 or not states[0]:
        raise ConfigError(
            f"{c.name}: vision_feature_layer selects the states {states} of the encoder; expected the output "
            "of one layer"
        )
    return states[0]


def unread(c: HFConfig) -> tuple[str, ...]:
    """Tensors of the layers after that one."""
    v = c.part("vision_config")
    layers = range(state(c, v), v.take_count("num_hidden_layers"))
    return tuple(f"*vision_tower.transformer.layers.{i}.*" for i in layers)


@register(
    "mistral3",
    reference="Mistral3ForConditionalGeneration",
    vision=True,
    carried=unread,
    # The layout that transformers itself uses comes first.
    layouts=vision_layouts({"vision.": ("", NAMES)}, EXPERTS, whole=("*.experts.*",))[::-1],
)
def mistral3(c: HFConfig) -> ModelSpec:
    return with_images(c, language_model(c))


def with_images(c: HFConfig, text: ModelSpec) -> ModelSpec:
    """The language model with the encoder, and with a projector whose norm is the language model's."""
    v = c.part("vision_config")
    merger = MistralMergerSpec(
        c.take_count("spatial_merge_size", 2),
        text.last_norm,
        projector_activation(c),
        c.take_flag("multimodal_projector_bias", False),
    )
    image_id = c.take_count(("image_token_index", "image_token_id"), 10, least=0)
    return replace(text, vision=pixtral.vision(v, merger, image_id, [state(c, v)]))


# -- tests

for_tests(
    "mistral3",
    tiny={
        "text_config": {
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "sliding_window": 7,
            "rms_norm_eps": 3e-3,
        },
        "vision_config": pixtral.TINY,
        "image_token_index": 3,
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
    variants={
        "an earlier layer": {"vision_feature_layer": -2},
        "three by three": {"spatial_merge_size": 3, "multimodal_projector_bias": False},
        "ministral3": {
            "text_config": {
                "model_type": "ministral3",
                "pad_token_id": 11,
                "rope_parameters": find_architecture("ministral3").tiny["rope_parameters"],
            }
        },
        "mistral4": {"text_config": {**find_architecture("mistral4").tiny, "sliding_window": ...}},
    },
)
