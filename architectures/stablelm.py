"""StableLM and StableLM 2 (Stability AI, 2023 and 2024, arXiv:2402.17834): LLaMA with LayerNorm and partial
rotary; in StableLM 2 also biases of query, key and value, or a LayerNorm of each head's query and key with
attention and MLP in parallel.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, QKNormSpec, Topology


@register(
    "stablelm",
    reference="StableLmForCausalLM",
    layouts=(Layout(((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm."))),),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 4096},
)
def stablelm(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5))
    attn = attention_as_wide_as_the_model(c, partial=0.25)
    attn = replace(attn, qkv_bias=c.take_flag("use_qkv_bias", False))
    if c.take_flag("qk_layernorm", False):
        attn = replace(attn, qk_norm=QKNormSpec(replace(norm, bias=False), scope="own_head"))
    topology: Topology = "parallel" if c.take_flag("use_parallel_residual", False) else "pre_norm"
    return decoder(c, [BlockSpec(attn, mlp(c), norm, topology)] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "stablelm",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_size": 64,
        "head_dim": ...,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
    },
)
