"""Flint (RecursiveSI, 2026): attention sinks and QK-norm per head in every layer, a sliding window on most
layers, the only ones with positions, and experts weighted by sigmoids next to a shared one.
"""

from dataclasses import replace

from liger_models.architectures import common
from liger_models.architectures.common import FULL, SLIDING
from liger_models.architectures.qwen2_moe import layers_with_experts
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "flint",
    reference="FlintForCausalLM",
    layouts=(
        common.expert_layouts((".self_attn.sinks", ".self_attn.softmax_offset"))[0],
        common.expert_layouts()[1],
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "router_aux_loss_coef": 0.0005,
    },
)
def flint(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32")
    attn = common.attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(attn, sinks=True, qk_norm=QKNormSpec(norm))
    dense = common.mlp(c)
    sparse = common.chosen_experts(
        c,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", True),
        float32_router=True,
        shared_expert=MLPSpec(c.take_count("shared_expert_intermediate_size"), dense.activation),
    )
    last = c.take_count("num_hidden_layers") - 1
    spans = common.windows(c, lambda i: FULL if i < 2 or i % 4 == 1 or i == last else SLIDING)
    blocks = [
        BlockSpec(
            replace(attn, window=window, rope=attn.rope if window else None), sparse if has else dense, norm
        )
        for window, has in zip(spans, layers_with_experts(c, dense=(0, 1)), strict=True)
    ]
    return common.decoder(c, blocks, norm)


# -- tests

for_tests(
    "flint",
    tiny={
        "attention_bias": True,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_only_layers": [0],
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
    },
    variants={
        "every_second": {"decoder_sparse_step": 2, "mlp_only_layers": []},
        "by default": {"layer_types": ..., "mlp_only_layers": None, "num_hidden_layers": 5},
    },
    skip={
        "key:num_local_experts": "another name of num_experts",
        "published:config": "no copy was at hand",
        "swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts",
    },
)
