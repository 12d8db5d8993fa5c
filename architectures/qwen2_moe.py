"""Qwen2 with experts (Yang et al., 2024, arXiv:2407.10671), Qwen1.5-MoE: experts with a gated shared expert,
and optionally a sliding window on every other of the lower layers.
"""

from collections.abc import Sequence
from dataclasses import replace

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts, mlp, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec


@register(
    "qwen2_moe",
    reference="Qwen2MoeForCausalLM",
    layouts=expert_layouts(),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "router_aux_loss_coef": 0.001,
    },
)
def qwen2_moe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = replace(attention(c), qkv_bias=c.take_flag("qkv_bias", True))
    slides, upper = c.take_flag("use_sliding_window", False), c.take_number("max_window_layers", 28)
    spans = windows(
        c,
        lambda i: "sliding_attention" if slides and i % 2 == 0 and i < upper else "full_attention",
        off=not slides,
    )
    dense, sparse = mlp(c), experts(c)
    shared = MLPSpec(c.take_count("shared_expert_intermediate_size"), dense.activation)
    sparse = replace(sparse, shared_expert=shared, shared_gate=True)
    blocks = [
        BlockSpec(replace(attn, window=window), sparse if has_experts else dense, norm)
        for window, has_experts in zip(spans, layers_with_experts(c), strict=True)
    ]
    return decoder(c, blocks, norm)


def layers_with_experts(c: HFConfig, dense: Sequence[int] = ()) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, except the `mlp_only_layers`, by default
    the `dense` ones.
    """
    every, dense = c.take_count("decoder_sparse_step", 1), c.take_layers("mlp_only_layers", list(dense))
    return [i not in dense and (i + 1) % every == 0 for i in range(c.take_count("num_hidden_layers"))]


def experts(c: HFConfig) -> MoESpec:
    """The routed experts."""
    return chosen_experts(c, renormalize=c.take_flag("norm_topk_prob", False))


# -- tests

for_tests(
    "qwen2_moe",
    tiny={
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "mlp_only_layers": [1],
        "qkv_bias": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    variants={
        "every_second": {"decoder_sparse_step": 2, "mlp_only_layers": []},
        "layer_types": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    },
    skip={
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
