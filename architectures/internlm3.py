"""InternLM3 (Shanghai AI Laboratory, 2025): LLaMA with one switch for all biases; transformers runs its LLaMA
class on it.
"""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "internlm3",
    reference="LlamaForCausalLM",
    reference_of="llama",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "pad_token_id": 2,
    },
)
def internlm3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    # Published configs have the names of its own code.
    bias = c.take_flag("attention_bias", c.take_flag("qkv_bias", False))
    if bias != c.take_flag("mlp_bias", c.take_flag("bias", False)):
        raise ConfigError(
            f"{c.name}: attention_bias (qkv_bias) is {bias} and mlp_bias (bias) is not; expected the same "
            "for both"
        )
    block = BlockSpec(attention(c, bias=bias), mlp(c, bias=bias), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "internlm3",
    tiny={"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    variants={"no_bias": {"attention_bias": False, "mlp_bias": False}},
    skip={
        **{f"variant:{key}=False": "both are one switch" for key in ("attention_bias", "mlp_bias")},
        "key:qkv_bias": "another name of attention_bias",
        "key:bias": "another name of mlp_bias",
    },
)
