"""Aria's language model (Rhymes AI, 2024, arXiv:2410.05993): LLaMA with experts in every layer, weighted by a
softmax over only the chosen ones, next to shared experts. Checkpoints store the experts transposed.
"""

from liger_models.architectures.common import INPUTS_FIRST, activation, attention, decoder, experts_and_chosen
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

WHOLE = ("*.experts.*",)
ON_DISK = (
    SHARED_EXPERTS,
    (".experts.gate_up_proj", ".experts.fc1.weight"),
    (".experts.down_proj", ".experts.fc2.weight"),
)


@register(
    "aria_text",
    reference="AriaTextForCausalLM",
    layouts=(Layout(ON_DISK, WHOLE, INPUTS_FIRST), Layout((SHARED_EXPERTS,), WHOLE, INPUTS_FIRST)),
    says_transposed=True,
    defaults={
        "intermediate_size": 4096,
        "max_position_embeddings": 2048,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
        "pad_token_id": 2,
    },
)
def aria_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    inner, count = c.take_count("intermediate_size"), c.take_count("moe_num_shared_experts")
    moe = MoESpec(
        *experts_and_chosen(c, ("moe_num_experts",), ("moe_topk",)),
        intermediate_size=inner,
        softmax_after_top_k=True,
        shared_expert=MLPSpec(count * inner, activation(c), c.take_flag("mlp_bias", False)),
    )
    return decoder(c, [BlockSpec(attn, moe, norm)] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "aria_text",
    tiny={
        "intermediate_size": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "moe_num_experts": 6,
        "moe_topk": 3,
        "moe_num_shared_experts": 3,
    },
    skip={
        "published:config": "no copy was at hand",
        "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
        "field:MoESpec.renormalize": "the same",
    },
)
