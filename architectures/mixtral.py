"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Mistral with mixtures of experts as MLPs; the weights of
the chosen experts are renormalised.
"""

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

IN_BLOCKS = (
    (".mlp.", ".block_sparse_moe."),
    (".router.", ".gate."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
"""How the experts are called on disk."""


@register(
    "mixtral",
    reference="MixtralForCausalLM",
    layouts=(Layout(IN_BLOCKS), *expert_layouts()),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
)
def mixtral(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, window=c.take_count("sliding_window", None), theta=1e6)
    moe = chosen_experts(c, ("num_local_experts", "num_experts"), size="intermediate_size")
    return decoder(c, [BlockSpec(attn, moe, norm)] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "mixtral",
    tiny={
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
    },
    skip={
        "key:num_experts": "another name of num_local_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
