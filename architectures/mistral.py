"""Mistral (Jiang et al., 2023, arXiv:2310.06825): LLaMA with a sliding window on all layers and no biases."""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "mistral",
    reference="MistralForCausalLM",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
def mistral(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    block = BlockSpec(attention(c, window=c.take_count("sliding_window", None)), mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "mistral",
    tiny={
        "num_key_value_heads": 1,
        "sliding_window": 7,
    },
)
