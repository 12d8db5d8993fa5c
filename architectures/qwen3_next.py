"""Qwen3-Next (Qwen Team, 2025): three layers of linear attention by the gated delta rule for each layer of
gated attention, and many small experts with a gated shared expert.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, expert_layouts, gated_delta, mixers, mlp, mtp
from liger_models.architectures.qwen2_moe import experts, layers_with_experts
from liger_models.architectures.qwen3_5_text import DEFAULTS, SKIP, TINY, centred_norm, gated_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec


@register(
    "qwen3_next",
    reference="Qwen3NextForCausalLM",
    layouts=expert_layouts(),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    carried=lambda c: ("mtp.*",),
    mtp=mtp.QWEN,
)
def qwen3_next(c: HFConfig) -> ModelSpec:
    norm, dense = centred_norm(c), mlp(c)
    shared = MLPSpec(c.take_count("shared_expert_intermediate_size"), dense.activation)
    sparse = replace(experts(c), shared_expert=shared, shared_gate=True)
    kinds = mixers(c, gated_delta(c, "qkvz", norm.eps), gated_attention(c, norm))
    blocks = [
        BlockSpec(mixer, sparse if has_experts else dense, norm)
        for mixer, has_experts in zip(kinds, layers_with_experts(c), strict=True)
    ]
    return decoder(c, blocks, norm)


# -- tests

EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.5,
}

for_tests(
    "qwen3_next",
    tiny={**TINY, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
    variants={
        "every_second": {"decoder_sparse_step": 2, "mlp_only_layers": []},
        "interval": {"layer_types": ..., "full_attention_interval": 2},
    },
    skip={
        **SKIP,
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
