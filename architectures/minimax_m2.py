"""MiniMax-M2 (MiniMax, 2025): experts chosen by sigmoid scores and a correction bias, QK-norm over all heads
together, and partial rotary.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts
from liger_models.architectures.mixtral import IN_BLOCKS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec

CORRECTION = (".router.correction_bias", ".e_score_correction_bias")
ONE_VALUE = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
NO_EFFECT = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp")


@register(
    "minimax_m2",
    reference="MiniMaxM2ForCausalLM",
    layouts=(Layout((CORRECTION, *IN_BLOCKS)), *expert_layouts(CORRECTION)),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    fixed=ONE_VALUE,
    unread=dict.fromkeys(NO_EFFECT, "of no effect here"),
)
def minimax_m2(c: HFConfig) -> ModelSpec:
    layers = c.take_count("num_hidden_layers")
    c.take_only(attn_type_list=[1] * layers)
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    turning = c.take_count("rotary_dim", None)
    share = 1.0 if turning is None else turning / c.take_count("head_dim")
    attn = replace(attention(c, partial=share, theta=5e6), qk_norm=QKNormSpec(norm, scope="all_heads"))
    moe = chosen_experts(
        *(c, ("num_local_experts", "num_experts")),
        size="intermediate_size",
        score="sigmoid",
        correction_bias=True,
    )
    return decoder(c, [BlockSpec(attn, moe, norm)] * layers, norm)


# -- tests

for_tests(
    "minimax_m2",
    tiny={
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    variants={"rotary_dim": {"rotary_dim": 10, "rope_parameters": {"rope_theta": 10000.0}}},
    skip={
        "key:num_experts": "another name of num_local_experts",
        "refusal:partial_rotary_factor": "the heads turn in part",
        "key:attn_type_list": "has one value, full attention everywhere",
    },
)
