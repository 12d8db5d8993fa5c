"""Persimmon (Adept, 2023): LayerNorm, also of each head's query and key, a plain MLP with squared ReLU,
rotary on half of each head, and biases everywhere. Checkpoints interleave query, key and value by head.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, QKNormSpec

NAMES = (
    *((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm."), (".o_proj.", ".dense.")),
    *((".mlp.up_proj.", ".mlp.dense_h_to_4h."), (".mlp.down_proj.", ".mlp.dense_4h_to_h.")),
    ("model.norm.", "model.final_layernorm."),
)
BY_HEAD = Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="heads")


@register(
    "persimmon",
    reference="PersimmonForCausalLM",
    layouts=(Layout(NAMES, joined=(BY_HEAD,)),),
    defaults={"hidden_act": "relu2", "max_position_embeddings": 16384},
)
def persimmon(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5))
    heads = c.take_count("num_attention_heads")
    attn = attention_as_wide_as_the_model(c, bias=True, kv_heads=heads, partial=0.5)
    if c.take_flag("qk_layernorm", True):
        attn = replace(attn, qk_norm=QKNormSpec(norm))
    block = BlockSpec(attn, mlp(c, bias=True, gated=False), norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "persimmon",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_act": "relu2",
        "hidden_size": 64,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
    },
)
