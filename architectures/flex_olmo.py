"""FlexOlmo (Shi et al., 2025, arXiv:2507.07024): OLMo 2 with experts that can be trained separately, each on
its own data, and merged later.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "flex_olmo",
    reference="FlexOlmoForCausalLM",
    layouts=expert_layouts(),
    defaults={
        "max_position_embeddings": 4096,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "router_aux_loss_coef": 0.01,
        "pad_token_id": 100277,
    },
)
def flex_olmo(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32")
    attn = attention(c, bias=c.take_flag("attention_bias", False), theta=500000.0)
    attn = replace(attn, qk_norm=QKNormSpec(norm, scope="all_heads"))
    moe = chosen_experts(c, size="intermediate_size", renormalize=c.take_flag("norm_topk_prob", False))
    block = BlockSpec(attn, moe, norm, topology="post_norm")
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "flex_olmo",
    tiny={
        "rms_norm_eps": 1e-2,  # so large that the norms after the experts do not hide a factor before them
        "intermediate_size": 32,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "attention_bias": True,
        "pad_token_id": 7,
    },
    skip={
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
