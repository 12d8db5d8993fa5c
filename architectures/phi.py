"""Phi-1, Phi-1.5 and Phi-2 (Li et al., 2023, arXiv:2309.05463): attention and a plain MLP in parallel after
one LayerNorm, biases everywhere, and partial rotary.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec, QKNormSpec

NAMES = (
    *((".o_proj.", ".dense."), (".up_proj.", ".fc1."), (".down_proj.", ".fc2.")),
    *(
        (".q_norm.", ".q_layernorm."),
        (".k_norm.", ".k_layernorm."),
        ("model.norm.", "model.final_layernorm."),
    ),
)


@register(
    "phi",
    reference="PhiForCausalLM",
    layouts=(Layout(rename=NAMES),),
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 2048},
)
def phi(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5))
    attn = replace(attention(c, bias=True, partial=0.5), dropout=c.take_dropout("attention_dropout"))
    if c.take_flag("qk_layernorm", False):
        attn = replace(attn, qk_norm=QKNormSpec(norm))
    block = BlockSpec(attn, mlp(c, bias=True, gated=False), norm, topology="parallel")
    block = replace(block, dropout=c.take_dropout("resid_pdrop"))
    blocks, dropout = [block] * c.take_count("num_hidden_layers"), c.take_dropout("embd_pdrop")
    return decoder(c, blocks, norm, head_bias=True, embed_dropout=dropout)


# -- tests

for_tests(
    "phi",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_act": "gelu_new",
        "hidden_size": 64,
        "head_dim": ...,  # the reference's norms of queries and keys assume hidden_size / heads
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    variants={
        "three_quarters": {"rope_parameters": {"partial_rotary_factor": 0.75}},
        "head_dim": {"head_dim": 24, "qk_layernorm": False},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        **{f"swap:model.layers.{i}.self_attn.o_proj.bias": "only the sum of both counts" for i in range(3)},
    },
)
