"""OLMo 2 (OLMo et al., 2024, arXiv:2501.00656): norms after the branches instead of before them, and QK-norm
over all heads together.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, QKNormSpec


@register(
    "olmo2", reference="Olmo2ForCausalLM", defaults={"max_position_embeddings": 2048, "pad_token_id": 1}
)
def olmo2(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5), cast="float32")
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(attn, qk_norm=QKNormSpec(norm, scope="all_heads"))
    block = BlockSpec(attn, mlp(c), norm, topology="post_norm")
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests("olmo2", tiny={"attention_bias": False})
