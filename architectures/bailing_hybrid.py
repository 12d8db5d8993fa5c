"""Ling 3.0 (inclusionAI, 2026): linear attention with a bounded decay per channel in five of every six
layers, latent attention with gated heads in the others, and the experts of DeepSeek-V3.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, LINEAR, decoder, kimi, mtp, rope
from liger_models.architectures.common.deepseek import (
    LATENT_VARIANTS,
    SHARED_EXPERTS,
    corrected_layouts,
    further_predictions,
    latent_attention,
    with_positions,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec, NormSpec

ON_DISK = (
    *kimi.MIXER,
    *((".self_attn.", ".attention."), (".o_proj.", ".dense.")),
    ("model.embed_tokens.", "model.word_embeddings."),
    *(SHARED_EXPERTS, (".router.correction_bias", ".gate.expert_bias"), (".router.", ".gate.")),
)
_, STACKED = corrected_layouts()
OF_MODULES = replace(
    STACKED, rename=(*kimi.MIXER[:1], *STACKED.rename), joined=(Joined("conv1d", kimi.CONVOLUTIONS),)
)


@register(
    "bailing_hybrid",
    reference="BailingHybridForCausalLM",
    layouts=(Layout(ON_DISK), OF_MODULES),
    defaults={
        **kimi.DEFAULTS,
        "moe_intermediate_size": 768,
        "num_experts": 512,
        "num_expert_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "pad_token_id": 156892,
    },
    carried=further_predictions,
    mtp=mtp.LING,
    unread={
        "tie_word_embeddings": "the reference has a head of its own",
        "qk_head_dim": "follows from the sizes of its parts",
        **dict.fromkeys(
            ("mtp_loss_scaling_factor", "num_mtp_layers"), "concerns predictions that do not run"
        ),
    },
)
def bailing_hybrid(c: HFConfig) -> ModelSpec:
    norm, plain = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6)), latent_attention(c, positions=False)
    turned = rope(kimi.positions(c, 262144), plain.qk_rope_head_dim, interleaved=True, theta=6e6)
    full = replace(with_positions(plain, turned), gates="heads")
    sizes = (
        c.take_count("linear_num_heads", full.num_attention_heads),
        c.take_count("linear_head_dim", c.take_count("head_dim", 128)),
        c.take_count("linear_conv_kernel_dim", c.take_count("short_conv_kernel_size", 4)),
    )
    bound, bounded = c.take("kda_lower_bound", -5.0), c.take_flag("kda_safe_gate", True)
    if not isinstance(bound, int | float) or not bound < 0:
        raise ConfigError(f"{c.name}: kda_lower_bound must be a negative number, found {bound!r}")
    linear = kimi.delta(c, sizes, "short_conv_kernel_size", norm, lower_bound=bound if bounded else None)
    every = c.take_count("layer_group_size", 6)
    blocks = kimi.blocks(
        *(c, linear, full, norm), default=lambda i: LINEAR if (i + 1) % every else FULL, first_dense=2
    )
    return replace(decoder(c, blocks, norm), tie_word_embeddings=False)


# -- tests

for_tests(
    "bailing_hybrid",
    tiny={
        **kimi.TINY,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 3,
        "num_nextn_predict_layers": 1,
        "kda_safe_gate": True,
        "kda_lower_bound": -3.0,
        "num_experts_per_token": 7,  # the bias rules some out
        "num_expert_group": 1,
        "topk_group": 1,
    },
    variants={
        "biases": LATENT_VARIANTS["biases"],
        "latent of queries": {"q_lora_rank": 14},
        "in groups": {"num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3},
        "not renormalised": {"moe_renormalize": False},
        "in groups of two": {"layer_types": ..., "layer_group_size": 2},
        "first layers dense": {"mlp_layer_types": ..., "first_k_dense_replace": 1},
        "other names": {"linear_head_dim": 8, "linear_num_heads": 6, "linear_conv_kernel_dim": 4},
    },
    skip={
        **kimi.SKIP,
        "key:model_max_length": "another name of max_position_embeddings",
        "refusal:head_dim_by_division": "head_dim has a default",
        "refusal:odd_head_dim": "only linear attention reads head_dim",
    },
)
