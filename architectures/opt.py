"""OPT (Meta, 2022, arXiv:2205.01068): GPT-2's form with ReLU, separate projections, and a table of positions
whose first two rows are unused.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, attention_as_wide_as_the_model, padding_row
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

BLOCK_NAMES = (
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    *((".input_layernorm.", ".self_attn_layer_norm."), (".post_attention_layernorm.", ".final_layer_norm.")),
    *((".mlp.up_proj.", ".fc1."), (".mlp.down_proj.", ".fc2.")),
)
NAMES = (*BLOCK_NAMES, ("decoder.norm.", "decoder.final_layer_norm."))


@register(
    "opt",
    reference="OPTForCausalLM",
    layouts=(Layout(NAMES, root="model.decoder."),),
    defaults={
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "dropout": 0.1,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    },
    fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
)
def opt(c: HFConfig) -> ModelSpec:
    bias, weighted = c.take_flag("enable_bias", True), c.take_flag("layer_norm_elementwise_affine", True)
    norm = LayerNormSpec(eps=1e-5, bias=weighted, weighted=weighted)
    attn = attention_as_wide_as_the_model(
        c, kv_heads=c.take_count("num_attention_heads"), bias=bias, positions=False
    )
    attn = replace(attn, dropout=c.take_dropout("attention_dropout"))
    act = activation(c, "activation_function", gated=False)
    mlp = MLPSpec(c.take_count("ffn_dim"), act, bias, gated=False)
    # In OPT-350M two projections change the width of the embeddings.
    c.take_only(word_embed_proj_dim=c.take_count("hidden_size"))
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=c.take_count("hidden_size"),
        blocks=(BlockSpec(attn, mlp, norm, dropout=c.take_dropout("dropout")),)
        * c.take_count("num_hidden_layers"),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("init_std", 0.02),
        padding_idx=padding_row(c),
        learned_positions=c.take_count("max_position_embeddings"),
        unused_positions=2,
        padding_has_positions=False,
    )


# -- tests

for_tests(
    "opt",
    tiny={
        "rms_norm_eps": ...,
        "hidden_act": ...,
        "activation_function": "relu",
        "hidden_size": 64,
        "intermediate_size": ...,
        "ffn_dim": 80,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "rope_parameters": ...,
        "initializer_range": ...,
        "init_std": 0.03,
        "dropout": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
    },
    variants={
        "gelu": {"activation_function": "gelu"},
        "no_bias": {"enable_bias": False},
        "norms_without_weights": {"layer_norm_elementwise_affine": False},
    },
    skip={
        "key:word_embed_proj_dim": "has one value",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
        **{
            f"swap:model.layers.{i}.self_attn.k_proj.bias": "without rotation it has no effect"
            for i in range(3)
        },
    },
)
