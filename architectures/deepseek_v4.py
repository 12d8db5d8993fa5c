"""DeepSeek-V4 (2026): four residual streams, attention to a window and to compressed keys that also serve as
values, and experts, chosen by token id in the first layers.
"""

from liger_models.architectures.common import decoder
from liger_models.architectures.common.deepseek_v4 import (
    HEAVY,
    SPARSE,
    WINDOW,
    compressed_attention,
    scored_or_hashed_experts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, StreamsSpec

EXPERTS = (".shared_expert.", ".shared_experts."), (".router.", ".gate.")
RELEASED = (
    *((".input_layernorm.", ".attn_norm."), (".post_attention_layernorm.", ".ffn_norm.")),
    *((".attn_hc.", ".hc_attn_"), (".ffn_hc.", ".hc_ffn_"), (".router.correction_bias", ".gate.bias")),
    *((".self_attn.", ".attn."), (".q_a_norm.", ".q_norm."), (".kv_norm.", ".norm.")),
    *((f".{name}_proj.", f".w{name}.") for name in ("q_a", "q_b", "kv", "o_a", "o_b")),
    *((".compressor.gate_proj.", ".compressor.wgate."), (".position_bias", ".ape")),
    *((".sinks", ".attn_sink"), (".mlp.", ".ffn."), ("lm_head.", "head."), *EXPERTS),
    *((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")),
)
MODULES = (
    (".self_attn.indexer.compressor.", ".self_attn.compressor.indexer."),
    (".self_attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".self_attn.indexer.", ".self_attn.compressor.indexer."),
    (".router.correction_bias", ".gate.e_score_correction_bias"),
    *(("stream_ends.", "hc_head.hc_"), *EXPERTS),
)


@register(
    "deepseek_v4",
    reference="DeepseekV4ForCausalLM",
    defaults={
        **{"head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128},
        **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "moe_intermediate_size": 2048},
        **{"n_routed_experts": 256, "num_experts_per_tok": 6, "router_aux_loss_coef": 0.001},
        **{"max_position_embeddings": 1048576},
    },
    layouts=(
        Layout((("stream_ends.", "hc_head.hc_"), *RELEASED)),
        Layout((("stream_ends.", "hc_head_"), ("embed_tokens.", "embed."), *RELEASED), root=""),
        Layout(MODULES, ("*.experts.*",)),
    ),
    carried=lambda c: ("mtp.*", "model.mtp.*"),
    fixed={
        **{"hidden_act": "silu", "scoring_func": "sqrtsoftplus", "norm_topk_prob": True},
        **{"n_shared_experts": 1, "mlp_bias": False},
    },
    unread={
        "num_key_value_heads": "there is one head of keys",
        **dict.fromkeys(("topk_method", "expert_dtype", "attention_bias"), "the reference does not read it"),
    },
)
def deepseek_v4(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32")
    counts = c.take_count("hc_mult", 4), c.take_count("hc_sinkhorn_iters", 20)
    streams = StreamsSpec(*counts, c.take_number("hc_eps", 1e-6), norm.eps)
    layers = zip(compressed_attention(c, norm), scored_or_hashed_experts(c), strict=True)
    return decoder(c, [BlockSpec(*parts, norm, "hyper_connected", streams=streams) for parts in layers], norm)


# -- tests

ROTARY = {"rope_type": "default", "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
for_tests(
    "deepseek_v4",
    tiny={
        **dict.fromkeys(("intermediate_size", "hidden_act", "num_key_value_heads"), ...),
        "num_hidden_layers": 4,
        "q_lora_rank": 28,
        "o_groups": 2,
        "o_lora_rank": 10,
        "sliding_window": 5,
        "index_n_heads": 24,
        "index_head_dim": 12,
        "index_topk": 3,
        "qk_rope_head_dim": 8,
        "layer_types": [SPARSE, HEAVY, WINDOW, SPARSE],
        "compress_rates": {SPARSE: 2, HEAVY: 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
        "swiglu_limit": 0.9,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-2,
        "rms_norm_eps": 1e-3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rope_parameters": {
            "main": {**ROTARY, "rope_theta": 1e4},
            "compress": {**ROTARY, "rope_theta": 1.6e5},
        },
    },
    variants={
        "stretched": {"rope_parameters": {"main": ROTARY, "compress": {**ROTARY, **YARN}}},
        "older names": {
            **dict.fromkeys(("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"), ...),
            **{"compress_ratios": [0, 4, 128, 0, 0], "compress_rate_csa": 3, "compress_rate_hca": 5},
            **{"num_hash_layers": 2, "qk_rope_head_dim": 6, "rope_theta": 500.0, "rope_scaling": YARN},
            "compress_rope_theta": 3000.0,
        },
        "rotated in part": {"rope_parameters": ..., "partial_rotary_factor": 0.25},
        "no key is left out": {"index_topk": 16},
    },
    skip={
        "positions:given": "the reference takes positions for the places of tokens",
        "padding:left": "the reference counts keys from the first place, padding included",
        "rope:all": "only layers with compressed keys are stretched, with a factor of the tables of its own",
        "refusal:theta": "the same",
        "refusal:partial_rotary_factor": "the last dimensions of heads turn",
    },
)
