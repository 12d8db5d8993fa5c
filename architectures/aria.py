"""Aria (Rhymes AI, 2024, arXiv:2410.05993): its mixture-of-experts language model with an encoder for images
of any shape; learned queries attend to the patches, and each gives a token.
"""

from dataclasses import replace

from liger_models.architectures.aria_text import ON_DISK, WHOLE
from liger_models.architectures.common import INPUTS_FIRST
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.common.images import language_model, vision_layouts
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import states_read, tokens_by_patches
from liger_models.architectures.idefics3 import DEFAULTS
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import FractionTable, MaskedPictures, ModelSpec, QueryProjectorSpec

PROJECTOR = (
    *((f".{name}_proj.", f".cross_attn.{name}_proj.") for name in "qkv"),
    (".in_proj.", ".cross_attn.multihead_attn.in_proj_"),
    (".out_proj.", ".cross_attn.multihead_attn.out_proj."),
    (".linear.", ".cross_attn.linear."),
    *((".norm_queries.", ".cross_attn.layer_norm."), (".norm_patches.", ".cross_attn.layer_norm_kv.")),
    (".norm.", ".layer_norm."),
    *((".linear_1.", ".feed_forward.linear_in."), (".linear_2.", ".feed_forward.linear_out.")),
)
VISION = {
    "vision.encoder.": ("vision_tower.", clip.NAMES),
    "vision.projector.": ("multi_modal_projector.", PROJECTOR),
}


def encoder(c: HFConfig) -> HFConfig:
    """Config of the encoder."""
    v = c.part("vision_config")
    v.model_type = clip.SIGLIP  # with other defaults
    v.fill(DEFAULTS)
    return v


@register(
    "aria",
    reference="AriaForConditionalGeneration",
    vision=True,
    layouts=(
        vision_layouts(VISION, ON_DISK, WHOLE, INPUTS_FIRST)[0],
        vision_layouts(VISION, (SHARED_EXPERTS,), WHOLE, INPUTS_FIRST)[1],
    ),
    says_transposed=True,
    carried=lambda c: clip.unread_tensors(c, encoder(c), -1),
)
def aria(c: HFConfig) -> ModelSpec:
    text, v, tokens = language_model(c), encoder(c), tokens_by_patches(c)
    queries = max(own for _, own in tokens)
    projector = QueryProjectorSpec(queries, v.take_count("num_attention_heads"), text.hidden_size)
    c.take("max_value_projector_patch_to_query_dict", None)  # computed from the other
    image_id = c.take_count(("image_token_index", "image_token_id"), 9, least=0)
    states = states_read(c, v, -1)
    if len(states) > 1:
        raise ConfigError(f"{c.name}: vision_feature_layer must be one layer, found {len(states)}")
    vision = clip.vision(v, projector, image_id, states, pictures=MaskedPictures(tokens))
    side = v.take_count("image_size") // v.take_count("patch_size")
    return replace(text, vision=replace(vision, position_table=FractionTable(side)))


# -- tests

for_tests(
    "aria",
    tiny={
        "text_config": {**find_architecture("aria_text").tiny, "model_type": "aria_text"},
        "vision_config": {**clip.TINY_SIGLIP, "model_type": "idefics3_vision", "image_size": 12},
        "projector_patch_to_query_dict": {"16": 3, "36": 5},
        "image_token_index": 3,
    },
    variants={"a lower layer": {"vision_feature_layer": -2}},
    skip={"published:config": "no copy was at hand"},
)
