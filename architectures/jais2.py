"""Jais 2 (MBZUAI, Inception and Cerebras, 2025): LayerNorm, a plain MLP with squared ReLU, and biases on
every projection.
"""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec


@register(
    "jais2", reference="Jais2ForCausalLM", defaults={"hidden_act": "relu2", "max_position_embeddings": 8192}
)
def jais2(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5))
    feed_forward = mlp(c, bias=c.take_flag("mlp_bias", True), gated=False)
    block = BlockSpec(attention(c, bias=c.take_flag("attention_bias", True)), feed_forward, norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "jais2",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
    },
)
