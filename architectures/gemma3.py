"""Gemma 3 (Gemma Team, 2025, arXiv:2503.19786), its text models: as Gemma 2 with norms of queries and keys in
place of soft caps, a window on five layers of six, and rotations of their own for those.
"""

import math
from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp, rope, windows
from liger_models.architectures.common.images import language_model
from liger_models.architectures.common.towers import (
    HEAD,
    SIGLIP,
    TINY_SIGLIP,
    square_vision,
    tower,
    tower_layouts,
)
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import BlockSpec, LinearProjectorSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "gemma3_text",
    reference="Gemma3ForCausalLM",
    tiny={
        "hidden_act": ...,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": True,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 2.0,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    variants={
        "layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "every_sixth": {"num_hidden_layers": 6, "sliding_window_pattern": ...},
        "thetas": {"rope_parameters": ..., "rope_theta": 500.0, "rope_local_base_freq": 100.0},
        "own_theta": {"rope_parameters": ..., "rope_theta": 500.0},
    },
    skip={
        "rope:yarn_fractional": "of settings by layer type the reference does not read truncate",
        **{
            f"field:RopeSpec.{name}": "seen without truncation"
            for name in ("truncate", "beta_fast", "beta_slow")
        },
    },
)
def gemma3_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    attn = replace(
        attention(c, bias=c.take_flag("attention_bias", False), layer_type="full_attention", theta=1e6),
        scale=c.take_number("query_pre_attn_scalar") ** -0.5,
        qk_norm=QKNormSpec(norm),
    )
    local = rope(c, attn.head_dim, layer_type="sliding_attention", local_theta=1e4)
    local = replace(local, max_position_embeddings=None)  # no distance is longer than the window
    feed_forward = mlp(c, key="hidden_activation")
    every = c.take_count("sliding_window_pattern", 6)
    slides = windows(c, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    mixers = [attn if window is None else replace(attn, window=window, rope=local) for window in slides]
    return decoder(
        c,
        [BlockSpec(mixer, feed_forward, norm, topology="sandwich") for mixer in mixers],
        norm,
        embed_scale=c.take_count("hidden_size") ** 0.5,
        logit_softcap=c.take_number("final_logit_softcapping", None),
    )


@register(
    "gemma3",
    reference="Gemma3ForConditionalGeneration",
    tiny={
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_act": ...,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "vision_config": {**TINY_SIGLIP, "image_size": 16},
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
    layouts=tower_layouts(
        (("norm.", "mm_soft_emb_norm."), ("linear.weight", "mm_input_projection_weight")),
        permuted=(("vision.projector.linear.weight", "i o -> o i"),),
    ),
    carried=lambda c: HEAD,
)
def gemma3(c: HFConfig) -> ModelSpec:
    """Gemma 3 (Gemma Team, 2025, arXiv:2503.19786): Gemma 3's text models with an encoder of images, SigLIP,
    whose patches are pooled; the tokens of an image all see one another.
    """
    text, v = language_model(c), tower(c, [SIGLIP])
    norm = NormSpec(eps=v.take_number("layer_norm_eps"), offset=1.0, cast="gemma")
    tokens = c.take_count("mm_tokens_per_image", 256)
    side = v.take_count("image_size") // v.take_count("patch_size")
    merge = side // math.isqrt(tokens)
    if not merge or (side // merge) ** 2 != tokens:
        raise ConfigError(
            f"{c.name}: mm_tokens_per_image is {tokens}, to which {side} times {side} patches of an image "
            "cannot be pooled"
        )
    for key in ("boi_token_index", "eoi_token_index"):
        c.take(key, None)  # which the processor places
    image_id = c.take_count("image_token_index", 262144, least=0)
    vision = square_vision(
        v, LinearProjectorSpec(merge, norm), image_id, kinds="token_type_ids", spans="images"
    )
    return replace(text, vision=vision)
