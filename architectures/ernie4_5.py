"""ERNIE 4.5, dense (Baidu, 2025): LLaMA with interleaved rotary, and one switch for all biases."""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "ernie4_5",
    reference="Ernie4_5ForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
)
def ernie4_5(c: HFConfig) -> ModelSpec:
    norm, bias = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), c.take_flag("use_bias", False)
    block = BlockSpec(attention(c, bias=bias, interleaved=True, theta=500000.0), mlp(c, bias=bias), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests("ernie4_5", tiny={"use_bias": True, "pad_token_id": 0, "tie_word_embeddings": True})
