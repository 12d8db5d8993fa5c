"""Kimi Linear (Kimi Team, 2025, arXiv:2510.26692): linear attention with a decay per channel in most layers,
latent attention without positions in the others, and the experts of DeepSeek-V3.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, kimi
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, latent_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec, NormSpec

ROUTER = ((".router.correction_bias", ".gate.e_score_correction_bias"), (".router.", ".gate."))
# Routed experts have names of their own, but not the MLPs of the first layers, nor the shared expert.
APART = tuple(
    (f".{owner}.{part}_proj.", f".{owner}.{part}-proj.")
    for owner in ("mlp", "shared_experts")
    for part in ("gate", "up", "down")
)
EXPERTS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."), ("-proj.", "_proj."))
SPARSE = ((".mlp.experts.", ".block_sparse_moe.experts."), (".mlp.gate.", ".block_sparse_moe.gate."))
SHARED = ((".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),)
ON_DISK = (*kimi.MIXER, SHARED_EXPERTS, *ROUTER, *APART, *EXPERTS)
DECAYS = (("*.A_log", "1 1 n 1 -> (1 1 n 1)"),)
LAYOUTS = (
    Layout((*ON_DISK, *SPARSE, *SHARED), permuted=DECAYS),
    Layout((*ON_DISK, (".mlp.", ".block_sparse_moe.")), permuted=DECAYS),
    Layout(
        (*kimi.MIXER[:1], SHARED_EXPERTS, *ROUTER),
        whole=("*.experts.*",),
        permuted=DECAYS,
        joined=(Joined("conv1d", kimi.CONVOLUTIONS),),
    ),
)
"""Layouts of the hub, of files written by transformers, and of its modules."""


@register(
    "kimi_linear",
    reference="KimiLinearForCausalLM",
    layouts=LAYOUTS,
    defaults={
        **kimi.DEFAULTS,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "pad_token_id": 163839,
    },
    fixed={"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}
    | {"num_nextn_predict_layers": 0, "use_grouped_topk": True},
    unread={
        **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), "no layer has positions"),
        **dict.fromkeys(("head_dim", "qk_head_dim"), "follows from the sizes of its parts"),
        "tie_word_embeddings": "the reference has a head of its own",
    },
)
def kimi_linear(c: HFConfig) -> ModelSpec:
    for key in ("max_position_embeddings", "model_max_length"):
        c.take_count(key, None)  # no layer has positions
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    linear, default = kimi.kimi_delta(c, norm)
    full = latent_attention(c, positions=False)
    blocks = kimi.blocks(c, linear, full, norm, default=default, first_dense=1)
    return replace(decoder(c, blocks, norm), tie_word_embeddings=False)


# -- tests

for_tests(
    "kimi_linear",
    tiny={
        **kimi.TINY,
        "rope_parameters": ...,
        "q_lora_rank": 28,
        "linear_num_heads": 6,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    },
    variants={
        "no latent of queries": {"q_lora_rank": None},
        "biases": {"attention_bias": True},
        "one group, not renormalised": {"num_expert_group": 1, "topk_group": 1, "moe_renormalize": False},
        "older keys": {
            **{"layer_types": ..., "mlp_layer_types": ..., "first_k_dense_replace": 2},
            "linear_attn_config": {
                **{"num_heads": 4, "head_dim": 12, "short_conv_kernel_size": 4},
                **{"kda_layers": [2, 3], "full_attn_layers": [1]},
            },
        },
        "five layers": {"num_hidden_layers": 5, "layer_types": ..., "mlp_layer_types": ...},
    },
    skip={**kimi.SKIP, "rope:all": "no layer has positions", "key:model_max_length": "the same"},
)
