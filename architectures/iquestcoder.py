"""IQuest-Coder (IQuestLab, 2026): LLaMA with wide heads; transformers runs its LLaMA class on it."""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "iquestcoder",
    reference="LlamaForCausalLM",
    reference_of="llama",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
    fixed={"clip_qkv": None, "use_sliding_window": False},
)
def iquestcoder(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    block = BlockSpec(attn, mlp(c, bias=c.take_flag("mlp_bias", False)), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests("iquestcoder", tiny={"head_dim": 12, "attention_bias": True, "mlp_bias": True})
