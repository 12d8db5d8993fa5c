"""Granite 4 Vision (IBM, 2026): Granite with CLIP's or SigLIP's encoder for images of any size, as tiles;
Q-Formers over windows turn outputs of several of its layers into features for several layers of the language
model.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import clip, parts
from liger_models.architectures.llava_next import GRIDS, KINDS
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

LAYOUTS = tuple(
    layout
    for inner in ("vision_model.", "")
    for layout in vision_layouts(
        {
            "vision.encoder.": (f"vision_tower.{inner}", clip.NAMES),
            "vision.projector.": ("", parts.QUERY_NAMES),
            "vision.newline.": ("", (("weight", "image_newline"),)),
        }
    )
)


def unread_tensors(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the encoder's layers after those that are read, and of its other unused tensors."""
    v = clip.tower(c, KINDS)
    read, depth = max(state for state, _ in parts.states_for_layers(c, v)), v.take_count("num_hidden_layers")
    layers = tuple(f"*vision_tower.*layers.{i}.*" for i in range(read, depth))
    corners = tuple(f"*spatial_projectors.{i}.*" for i in range(len(parts.targets(c)), parts.CORNERS))
    return (*layers, *corners, "*vision_tower.*post_layernorm.*", *clip.HEAD)


@register(
    "granite4_vision",
    reference="Granite4VisionForConditionalGeneration",
    vision=True,
    layouts=LAYOUTS,
    carried=unread_tensors,
)
def granite4_vision(c: HFConfig) -> ModelSpec:
    c.fill({"qformer_config": {"num_hidden_layers": 1, "cross_attention_frequency": 1}})
    text, v, q = language_model(c), clip.tower(c, KINDS), c.part("qformer_config")
    c.take_only(use_spatial_sampling=True, spatial_stride=2)  # of older configs
    c.take_only(vision_feature_select_strategy="default" if v.model_type == clip.CLIP else "full")
    for key in ("vision_feature_layer", "image_seq_length", "use_image_newline_parameter"):
        c.take(key, None)  # not read, or by the processor
    read = parts.states_for_layers(c, v)
    layers = [layer for _, layer in read]
    if len(set(layers)) < len(layers) or max(layers) >= len(text.blocks) or min(layers) < 0:
        raise ConfigError(
            f"{c.name}: deepstack_layer_map and spatial_target_layers name the layers {layers} of a language "
            f"model of {len(text.blocks)}; expected different ones"
        )
    states = sorted({state for state, _ in read})
    side = v.take_count("image_size") // v.take_count("patch_size")
    projector = parts.window_queries(c, q, side, v.take_count("hidden_size"), tuple(layers))
    projector = replace(projector, states=tuple(states.index(state) for state, _ in read))
    pictures = replace(parts.tiles(c, v, GRIDS, None), token_side=projector.token_side)
    image_id = c.take_count("image_token_index", 32000, least=0)
    return replace(text, vision=clip.vision(v, projector, image_id, states, pictures))


# -- tests

TINY_Q: dict[str, Any] = {
    "model_type": "blip_2_qformer",
    **{"hidden_size": 64, "num_attention_heads": 1, "encoder_hidden_size": 64},  # read before 5.23
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "cross_attention_frequency": 1,
    "layer_norm_eps": 2e-3,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
TEXT = {**find_architecture("granite").tiny, "model_type": "granite4_vision_text", "num_hidden_layers": 6}
for_tests(
    "granite4_vision",
    tiny={
        "text_config": TEXT,
        "vision_config": {**clip.TINY_SIGLIP, "hidden_size": 64, "image_size": 24, "num_hidden_layers": 3},
        "qformer_config": TINY_Q,
        "image_token_index": 3,
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[24, 24], [48, 48], [24, 72], [72, 24]],
        "downsample_rate": "2/4",
        "projector_dropout": 0.0,
        "deepstack_layer_map": [[-3, 3], [-2, 0]],
        "spatial_vision_layer": -2,
        "spatial_target_layers": [2, 1, 5, 4],
    },
    variants={
        "clip, two layers of queries, two corners": {
            "vision_config": {**clip.TINY_CLIP, "hidden_size": 64, "image_size": 24},
            "vision_feature_select_strategy": "default",
            "qformer_config": {**TINY_Q, "num_hidden_layers": 2, "cross_attention_frequency": 2},
            "spatial_target_layers": [2, 1],
        },
    },
    skip={
        "field:WindowQueriesSpec.frequency": "of more layers than one: the variant has two",
        "field:VisionSpec.added": "all features are added to embeddings of zeros",
    },
)
