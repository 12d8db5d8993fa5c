"""MiMo-V2-Flash (Xiaomi, 2026, arXiv:2601.02780): values narrower than keys, and the experts of DeepSeek-V3.
Five of every six layers have a sliding window, attention sinks, twice the key/value heads, and a rotary
embedding of their own.
"""

from dataclasses import replace

from liger_models.architectures import common
from liger_models.architectures.common import FULL, SLIDING
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    TINY_EXPERTS,
    dense_or_sparse,
    routed_and_shared_experts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

BIAS = (".router.correction_bias", ".gate.e_score_correction_bias")
SINKS = (".self_attn.sinks", ".self_attn.attention_sink_bias")
SIZES = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")


@register(
    "mimo_v2_flash",
    reference="MiMoV2FlashForCausalLM",
    layouts=(common.expert_layouts(BIAS, SINKS)[0], common.expert_layouts(BIAS)[1]),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "attention_value_scale": 0.707},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8},
        **{"n_group": 1, "topk_group": 1, "sliding_window": 129, "max_position_embeddings": 131072},
    },
    carried=lambda c: ("model.mtp.*",),
    # Of the released config; the reference reads none of them.
    fixed={
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None},
        **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        **{"layernorm_epsilon": 1e-5, "swa_rope_theta": 1e4},
    },
    unread=dict.fromkeys((*SIZES, "attention_chunk_size"), "the reference does not read it"),
)
def mimo_v2_flash(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    bias = c.take_flag("attention_bias", False)
    full = common.attention(c, bias=bias, layer_type=FULL, theta=5e6, partial=0.334)
    full = replace(full, v_head_dim=c.take_count("v_head_dim"), o_bias=False)
    kv_heads = 2 * full.num_key_value_heads
    common.check_groups(c, full.num_attention_heads, kv_heads)
    local = common.rope(c, full.head_dim, layer_type=SLIDING, local_theta=1e4, partial=0.334)
    sliding = replace(full, num_key_value_heads=kv_heads, sinks=True, rope=local)
    experts = routed_and_shared_experts(
        c,
        ("n_routed_experts", "num_local_experts"),
        shared=None,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", True),
        correction_bias=True,
        float32_router=True,
    )
    # The released config counts the tokens before the query's own, and has numbers for the types of layers.
    before = c.take_count("sliding_window_size", None)
    spans = common.windows(c, lambda i: SLIDING if i and (i + 1) % 6 else FULL)
    spans = [window and (before + 1 if before else window) for window in spans]
    mlps = dense_or_sparse(c, common.mlp(c), experts, 1)
    c.take_only(hybrid_layer_pattern=[int(window is not None) for window in spans])
    c.take_only(moe_layer_freq=[int(inner is experts) for inner in mlps])
    scales = c.take_number("attention_value_scale", 1.0), 1.0, 1.0  # attention is linear in the values
    blocks = [
        BlockSpec(replace(sliding, window=window) if window else full, inner, norm, branch_scales=scales)
        for window, inner in zip(spans, mlps, strict=True)
    ]
    return common.decoder(c, blocks, norm)


# -- tests
for_tests(
    "mimo_v2_flash",
    tiny={
        **TINY_EXPERTS,
        "n_shared_experts": ...,
        "first_k_dense_replace": ...,
        "head_dim": 20,
        "v_head_dim": 10,
        "attention_bias": True,
        "attention_value_scale": 0.6,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.34},
        },
    },
    variants={
        "in groups": IN_GROUPS,
        "as released": {
            "sliding_window_size": 4,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "moe_layer_freq": [1, 0, 1],
            "hybrid_layer_pattern": [1, 0, 1],
            "swa_num_key_value_heads": 4,
        },
        "by default": {"layer_types": ..., "num_hidden_layers": 6, "rope_parameters": ...},
    },
    skip={
        "variant:kv_heads_as_many_as_heads": "layers with a window have twice as many key/value heads",
        "refusal:partial_rotary_factor": "a part of each head may turn",
        "rope:all": "the reference reads only settings by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
        "key:num_local_experts": "another name of n_routed_experts",
        "key:hybrid_layer_pattern": "repeats layer_types, with which it is compared",
        "key:moe_layer_freq": "repeats mlp_layer_types, with which it is compared",
        "published:config": "no copy was at hand",
    },
)
