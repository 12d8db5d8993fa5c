"""GLM-5.3-Flash (Z.ai, 2026): linear attention with a bounded decay per channel in three of every four
layers; in the others latent attention without positions, to pools of keys that an indexer chooses; four
residual streams, DeepSeek-V3's experts with clamped activations, and the encoder of GLM-OCR.
"""

from dataclasses import replace

from liger_models.architectures.common import kimi
from liger_models.architectures.common.deepseek import SKIP_LATENT, TINY_EXPERTS, corrected_layouts
from liger_models.architectures.common.images import own_text
from liger_models.architectures.encoders import glm4v as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

SEPARATE, STACKED = corrected_layouts()
STREAMS = (".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_")
RELEASED = Layout((*kimi.MIXER, *STREAMS, *SEPARATE.rename))
MODULES = replace(
    STACKED,
    rename=(*kimi.MIXER[:1], *STACKED.rename),
    joined=(Joined("conv1d", kimi.CONVOLUTIONS),),
)


@register(
    "glm5_next",
    reference="Glm5NextForConditionalGeneration",
    vision=True,
    layouts=(encoder.layout(RELEASED), encoder.layout(MODULES)),
    carried=lambda c: encoder.further_layers(c, 45),
    defaults={"image_token_id": 154854},
)
def glm5_next(c: HFConfig) -> ModelSpec:
    text, v = kimi.language_model(own_text(c)), c.part("vision_config")
    return replace(text, vision=encoder.clamped_vision(c, v, text.hidden_size))


# -- tests

for_tests(
    "glm5_next",
    tiny={
        "text_config": {
            "model_type": "glm5_next_text",
            **TINY_EXPERTS,
            **dict.fromkeys(("rope_parameters", "head_dim", "first_k_dense_replace"), ...),
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 28,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 0,
            "v_head_dim": 12,
            "rms_norm_eps": 0.05,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "index_n_heads": 24,
            "index_head_dim": 10,
            "index_topk": 6,
            "index_kpool": 3,
            "linear_num_heads": 6,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "linear_lower_bound": -3.0,
            "swiglu_limit": 0.9,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 1e-2,
            "router_aux_loss_coef": 0.5,
            "output_router_logits": False,
            "pad_token_id": 7,
        },
        "vision_config": {
            "model_type": "glm5_next_vision",
            **encoder.TINY,
            "out_hidden_size": 48,
            "projection_intermediate_size": 56,
            "swiglu_limit": 0.7,
        },
        "image_token_id": 3,
        "video_token_id": 4,
    },
    variants={
        "no_biases": {"vision_config": {"attention_bias": False}},
        "unbounded": {"text_config": {"linear_lower_bound": None, "attention_bias": True}},
    },
    skip={
        **SKIP_LATENT,
        "published:config": "no copy was at hand",
    },
)
