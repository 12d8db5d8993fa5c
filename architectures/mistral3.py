"""Mistral Small 3.1 (Mistral AI, 2025): Mistral, Ministral 3 or Mistral Small 4 that sees images of all sizes
through Pixtral's encoder (arXiv:2410.07073).
"""

from collections.abc import Sequence
from dataclasses import replace

from liger_models.architectures import ministral3, mistral4  # noqa: F401  (whose configs the variants take)
from liger_models.architectures.common import activation, mlp, take_only
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.common.images import encoder_attention, language_model, patches
from liger_models.architectures.registry import find_architecture, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.spec import (
    BlockSpec,
    MistralMergerSpec,
    ModelSpec,
    NormSpec,
    PaddedPictures,
    ProjectorSpec,
    VisionSpec,
)

PIXTRAL = (
    ("encoder.patch_embed.", "vision_tower.patch_conv."),
    ("encoder.norm_before.", "vision_tower.ln_pre."),
    ("encoder.layers.", "vision_tower.transformer.layers."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.", ".attention."),
    (".mlp.", ".feed_forward."),
)
"""Names of the encoder."""
NAMES = (
    *PIXTRAL,
    ("projector.merging_layer.", "projector.patch_merger.merging_layer."),
    ("projector.", "multi_modal_projector."),
)
EXPERTS = (SHARED_EXPERTS, (".router.", ".gate."))  # of Mistral Small 4


@register(
    "mistral3",
    reference="Mistral3ForConditionalGeneration",
    tiny={
        "text_config": {
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "sliding_window": 7,
            "rms_norm_eps": 3e-3,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 3,
            "image_size": 60,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        "image_token_index": 3,
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
    layouts=(
        Layout(EXPERTS, ("*.experts.*",), root="model.language_model.", parts=(("vision.", Layout(NAMES)),)),
        Layout(
            (*EXPERTS, ("lm_head.", "language_model.lm_head.")),
            ("*.experts.*",),
            root="language_model.model.",
            parts=(("vision.", Layout(NAMES, root="")),),
        ),
    ),
    variants={
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
def mistral3(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    c.fill({"projector_hidden_act": "gelu"})
    take_only(c, vision_feature_layer=-1)
    merger = MistralMergerSpec(
        c.take_count("spatial_merge_size", 2),
        text.norm,
        activation(c, "projector_hidden_act", gated=False),
        c.take_flag("multimodal_projector_bias", False),
    )
    image_id = c.take_one_of("image_token_index", "image_token_id", default=10)
    return replace(text, vision=pixtral(v, merger, image_id))


def pixtral(v: HFConfig, projector: ProjectorSpec, image_id: int, states: Sequence[int] = ()) -> VisionSpec:
    """Pixtral's encoder, from its config: pairs of a head turn by the row with the frequencies of even
    numbers, and by the column with the others. `states` is what goes out of it, as of `square_vision`.
    """
    for key in ("image_size", "vocab_size"):
        v.take(key, None)  # that of the largest image is the processor's, and there is no vocabulary
    v.fill({"hidden_act": "gelu", "intermediate_size": 4096})
    width, heads = v.take_count("hidden_size", 1024), v.take_count("num_attention_heads", 16)
    take_only(v, head_dim=width // heads)
    attention = encoder_attention(v, width, heads)
    assert attention.rope is not None
    pairs = range(attention.head_dim // 2)
    rope = replace(attention.rope, frequencies=(*pairs[::2], *pairs[1::2]))
    norm = NormSpec(eps=1e-5)
    block = BlockSpec(replace(attention, rope=rope, qkv_bias=False, o_bias=False), mlp(v), norm)
    return VisionSpec(
        width,
        patches(v, 16, bias=False, frames=1),
        (block,) * (max(states) if states else v.take_count("num_hidden_layers", 24)),
        projector,
        image_id,
        pictures=PaddedPictures(),
        norm_before=norm,
        taken=() if len(states) == 1 and states[0] > 0 else tuple(states),
    )
