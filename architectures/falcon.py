"""Falcon and Falcon 2 (TII, 2023 and 2024, arXiv:2311.16867, 2407.14885): attention and a plain MLP in
parallel, after one LayerNorm or two, with one key/value head or several. Checkpoints store query, key and
value together, grouped by key/value head.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, attention_as_wide_as_the_model, decoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, MLPSpec, ModelSpec, Topology

NAMES = (
    *(("embed_tokens.", "word_embeddings."), (".layers.", ".h."), ("transformer.norm.", "transformer.ln_f.")),
    *((".self_attn.o_proj.", ".self_attention.dense."), (".self_attn.", ".self_attention.")),
    *((".mlp.up_proj.", ".mlp.dense_h_to_4h."), (".mlp.down_proj.", ".mlp.dense_4h_to_h.")),
    *((".attention_norm.", ".ln_attn."), (".mlp_norm.", ".ln_mlp.")),
)
BY_HEAD = Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="key_value_heads")


@register(
    "falcon",
    reference="FalconForCausalLM",
    layouts=(Layout(NAMES, root="transformer.", joined=(BY_HEAD,)),),
    defaults={
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    fixed={"alibi": False},
)
def falcon(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    new, bias = c.take_flag("new_decoder_architecture", False), c.take_flag("bias", False)
    kv_heads = c.take_count("num_kv_heads", c.take_count("num_attention_heads"))
    if c.take_flag("multi_query", True) and not new:
        kv_heads = 1
    attn = attention_as_wide_as_the_model(c, kv_heads=kv_heads, bias=bias)
    width = c.take_count("ffn_hidden_size", 4 * c.take_count("hidden_size"))
    mlp = MLPSpec(width, activation(c, "activation", gated=False), bias, gated=False)
    norms, parallel = c.take_count("num_ln_in_parallel_attn", 2), c.take_flag("parallel_attn", True)
    topology: Topology = "parallel_two_norms" if norms == 2 and new else "parallel"
    block = BlockSpec(attn, mlp, norm, topology if parallel or new else "pre_norm")
    return replace(decoder(c, [block] * c.take_count("num_hidden_layers"), norm), padding_idx=None)


# -- tests

for_tests(
    "falcon",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_epsilon": 1e-4,
        "hidden_act": ...,
        "activation": "gelu_pytorch_tanh",
        "intermediate_size": ...,
        "ffn_hidden_size": 80,
        "hidden_size": 64,
        "num_key_value_heads": ...,
        "num_kv_heads": 2,
        "head_dim": ...,
        "new_decoder_architecture": True,
        "bias": True,
        "tie_word_embeddings": True,
    },
    variants={
        "one_norm": {"num_ln_in_parallel_attn": 1},
        "one_key_value_head": {"new_decoder_architecture": False},
        "all_key_value_heads": {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
        },
        "one_after_the_other": {"new_decoder_architecture": False, "parallel_attn": False},
    },
    skip={
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
        "null:layer_norm_epsilon": "the reference cannot run with it",
        **{f"swap:model.layers.{i}.self_attn.o_proj.bias": "only the sum of both counts" for i in range(3)},
    },
)
