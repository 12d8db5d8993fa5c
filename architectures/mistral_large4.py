"""Mistral Large 4 (Mistral AI, 2026): latent attention to keys that indexers choose, with latents that layers
may share; learned scales for queries by position and for rotary frequencies; layers without positions;
grouped experts chosen by a softmax; and Pixtral's encoder.
"""

from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SHARED_EXPERTS,
    SKIP_INDEXER,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
)
from liger_models.architectures.common.images import own_text
from liger_models.architectures.common.mistral_large4 import YARN, language_model
from liger_models.architectures.encoders import pixtral
from liger_models.architectures.mistral3 import NAMES, unread, with_images
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

RELEASED = (
    *(("embed_tokens.", "tok_embeddings."), ("rotary_emb.", "lerope."), ("lm_head.", "output.")),
    *((".self_attn.", ".attention."), (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa.")),
    *((".kv_b_proj.", ".wkv_b."), (".kv_a_layernorm.", ".kv_a_norm.")),
    *((".input_layernorm.", ".attention_norm."), (".post_attention_layernorm.", ".ffn_norm.")),
    *((f".softmax_scaling.{name}", f".ssmax_scaling.{name[0]}") for name in ("scale", "bias")),
    *((".mlp.experts.", ".experts."), (".mlp.shared_expert.", ".shared_experts.")),
    *((".mlp.router.", ".gate."), (".mlp.", ".feed_forward.")),
    *pixtral.OWN_NAMES,
)
LAYOUTS = (
    Layout(RELEASED, (), pixtral.PERMUTED, "", parts=(("vision.", Layout(pixtral.RELEASED, root="")),)),
    Layout(
        (SHARED_EXPERTS, (".router.", ".gate.")),
        ("*.experts.*",),
        root="model.language_model.",
        parts=(("vision.", Layout(NAMES, root="model.")),),
    ),
)


@register(
    "mistral_large4",
    reference="MistralLarge4ForConditionalGeneration",
    vision=True,
    layouts=LAYOUTS,
    carried=lambda c: (*unread(c), "mtp_dspark.*"),
)
def mistral_large4(c: HFConfig) -> ModelSpec:
    return with_images(c, language_model(own_text(c)))


# -- tests

for_tests(
    "mistral_large4",
    tiny={
        "text_config": {
            "model_type": "mistral_large4_text",
            **TINY_LATENT,
            **TINY_EXPERTS,
            **TINY_INDEXER,
            **IN_GROUPS,
            "q_lora_rank": ...,
            "norm_topk_prob": ...,
            "num_hidden_layers": 5,
            "index_n_heads": 24,
            "final_logit_softcapping": 2.0,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "kv_source_layers": [0, 1, 0, 1, 4],
            "indexer_types": ["full", "shared", "full", "full", "shared"],
            "rope_parameters": {
                **YARN,
                "factor": 8.0,
                "original_max_position_embeddings": 5,
                "mscale_all_dim": 0.4,
            },
        },
        "vision_config": pixtral.TINY,
        "image_token_index": 3,
        "spatial_merge_size": 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
    variants={
        "by numbers": {
            "text_config": {
                **dict.fromkeys(
                    ("indexer_types", "no_rope_layers", "kv_source_layers", "rope_parameters"), ...
                ),
                **{"index_topk_freq": 2, "index_skip_topk_offset": 1, "no_rope_layer_interval": 3},
                **{"attention_bias": True, "index_topk": 7, "first_k_dense_replace": 2, "num_experts": 12},
                "final_logit_softcapping": ...,
            }
        },
        "by lists": {
            "text_config": {
                **{"indexer_types": ..., "index_topk_pattern": "FSSFF", "first_k_dense_replace": ...},
                "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"],
                "kv_source_layers": [0, 1, 2, 1, 2],
            }
        },
    },
    skip={**SKIP_LATENT, **SKIP_INDEXER},
)
