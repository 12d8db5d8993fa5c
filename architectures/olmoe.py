"""OLMoE (Muennighoff et al., 2024, arXiv:2409.02060): LLaMA with experts, and QK-norm over all heads
together.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "olmoe",
    reference="OlmoeForCausalLM",
    layouts=expert_layouts(),
    defaults={
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
        "pad_token_id": 1,
    },
)
def olmoe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    if attn.q_size != c.take_count("hidden_size"):  # the reference's query norm has this width
        raise ConfigError(f"{c.name}: head_dim must be hidden_size / num_attention_heads, or left out")
    moe = chosen_experts(c, size="intermediate_size", renormalize=c.take_flag("norm_topk_prob", False))
    block = BlockSpec(replace(attn, qk_norm=QKNormSpec(norm, scope="all_heads")), moe, norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "olmoe",
    tiny={
        "head_dim": ...,
        "intermediate_size": 32,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "attention_bias": True,
    },
    skip={
        "key:num_local_experts": "another name of num_experts",
        "key:head_dim": "follows from hidden_size, and is checked",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
