"""AFM (Arcee AI, 2025): LLaMA with a plain MLP with squared ReLU."""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "arcee", reference="ArceeForCausalLM", defaults={"hidden_act": "relu2", "max_position_embeddings": 4096}
)
def arcee(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    feed_forward = mlp(c, bias=c.take_flag("mlp_bias", False), gated=False)
    block = BlockSpec(attention(c, bias=c.take_flag("attention_bias", False)), feed_forward, norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests("arcee", tiny={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True})
