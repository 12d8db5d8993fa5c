"""Qwen3 with experts (Yang et al., 2025, arXiv:2505.09388): Qwen3 with mixtures of experts as MLPs, except in
layers that the config keeps dense.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, expert_layouts, mlp
from liger_models.architectures.qwen2_moe import experts, layers_with_experts
from liger_models.architectures.qwen3 import normed_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "qwen3_moe",
    reference="Qwen3MoeForCausalLM",
    layouts=expert_layouts(),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "router_aux_loss_coef": 0.001,
    },
    # Of Qwen3-Coder; the reference reads neither.
    fixed={"use_qk_norm": True, "shared_expert_intermediate_size": 0},
    unread={"max_window_layers": "of no effect in these models"},
)
def qwen3_moe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    window = c.take_count("sliding_window", None) if c.take_flag("use_sliding_window", False) else None
    c.take("sliding_window", None)
    attn, dense, sparse = replace(normed_attention(c, norm), window=window), mlp(c), experts(c)
    blocks = [BlockSpec(attn, sparse if has else dense, norm) for has in layers_with_experts(c)]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "qwen3_moe",
    tiny={
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "mlp_only_layers": [0],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    variants={"every_second": {"decoder_sparse_step": 2, "mlp_only_layers": []}},
    skip={
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
