"""Lara 4 Mini (Translated, 2026): gated delta rules in two layers of five, a sliding window in two, the only
ones with positions, and full attention in the fifth; many small experts and a shared one.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    LINEAR,
    SLIDING,
    activation,
    attention,
    chosen_experts,
    decoder,
    expert_layouts,
    gated_delta,
    layer_types,
)
from liger_models.architectures.qwen3_5_text import SKIP
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LogRates, MixerSpec, MLPSpec, ModelSpec, NormSpec, QKNormSpec

PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
USUAL = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


@register(
    "lara_mini",
    reference="LaraMiniForCausalLM",
    layouts=(
        replace(
            expert_layouts((".linear_attn.norm.", ".linear_attn.out_norm."))[1],
            joined=(Joined("in_proj", PARTS),),
        ),
        expert_layouts()[1],
    ),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "sliding_window": 512},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 128},
        **{"num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "tie_word_embeddings": True},
    },
)
def lara_mini(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32")
    sliding = attention(c, bias=c.take_flag("attention_bias", False), window=c.take_count("sliding_window"))
    sliding = replace(sliding, qk_norm=QKNormSpec(norm))
    mixers: dict[str, MixerSpec] = {
        LINEAR: gated_delta(c, "qkv", norm.eps, norm_cast="float32"),
        SLIDING: sliding,
        FULL: replace(sliding, window=None, rope=None),
    }
    experts = chosen_experts(
        c,
        renormalize=c.take_flag("norm_topk_prob", True),
        float32_router=True,
        shared_expert=MLPSpec(c.take_count("shared_expert_intermediate_size"), activation(c)),
    )
    kinds = layer_types(c, lambda i: USUAL[i % len(USUAL)], (LINEAR, SLIDING, FULL))
    rates = (("*.linear_attn.A_log", LogRates(1.0, 16.0)),)
    return decoder(c, [BlockSpec(mixers[kind], experts, norm) for kind in kinds], norm, fresh=rates)


# -- tests

for_tests(
    "lara_mini",
    tiny={
        "intermediate_size": ...,
        "rms_norm_eps": 3e-2,  # outputs of heads cross zero, where a norm with a small epsilon jumps
        "attention_bias": True,
        "layer_types": [LINEAR, SLIDING, FULL],
        "sliding_window": 7,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "tie_word_embeddings": True,
    },
    variants={"usual layers": {"layer_types": ..., "num_hidden_layers": 5}},
    skip={
        **{key: reason for key, reason in SKIP.items() if key.endswith("hidden_act")},
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
        "swap:model.layers.2.self_attn.q_norm.weight": "without positions only the product of both counts",
    },
)
