"""OLMo (Groeneveld et al., 2024, arXiv:2402.00838): LLaMA with LayerNorms without parameters, and
queries, keys and values that may be clamped.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec


@register(
    "olmo",
    reference="OlmoForCausalLM",
    defaults={"max_position_embeddings": 2048, "pad_token_id": 1},
)
def olmo(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=1e-5, bias=False, weighted=False)
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(attn, qkv_limit=c.take_number("clip_qkv", None, positive=True))
    block = BlockSpec(attn, mlp(c), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "olmo",
    tiny={"rms_norm_eps": ..., "attention_bias": True, "clip_qkv": 0.7},
    variants={"no limit": {"clip_qkv": None}},
    skip={"rounding:norms": "the norms have no weights by whose names they are found"},
)
