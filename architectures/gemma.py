"""Gemma (Gemma Team, 2024, arXiv:2403.08295): zero-centred norm weights (1 + w), a GELU-gated MLP, wide
heads, and scaled embeddings tied to the head.
"""

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec


@register(
    "gemma",
    reference="GemmaForCausalLM",
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
)
def gemma(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    block = BlockSpec(attention(c, bias=c.take_flag("attention_bias", False)), _mlp(c), norm)
    blocks = [block] * c.take_count("num_hidden_layers")
    return decoder(c, blocks, norm, embed_scale=c.take_count("hidden_size") ** 0.5)


def _mlp(c: HFConfig) -> MLPSpec:
    """MLP with the tanh form of GELU: early configs say "gelu", but the models were trained with the tanh
    form, and readers of these configs use it.
    """
    spec, later = mlp(c), c.take("hidden_activation", None)
    spec = MLPSpec(spec.intermediate_size, "gelu_tanh") if spec.activation == "gelu" else spec
    if later is not None and mlp(c, key="hidden_activation") != spec:
        raise ConfigError(
            f"{c.name}: hidden_act is {c.take('hidden_act')!r} and hidden_activation {later!r}, two "
            "activations; keep the one that the model was trained with"
        )
    return spec


# -- tests

for_tests(
    "gemma",
    tiny={
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    variants={"silu": {"hidden_act": "silu"}},
    skip={"key:hidden_activation": "a later name of hidden_act, which it must not contradict"},
)
