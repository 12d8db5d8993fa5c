"""XGLM (Meta, 2021, arXiv:2112.10668): GPT-2's form with fixed sinusoidal positions, scaled embeddings and
separate projections, trained on thirty languages.
"""

from liger_models.architectures.common import activation, padding_row
from liger_models.architectures.opt import BLOCK_NAMES
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

UNUSED = 2  # positions before the first


@register(
    "xglm",
    reference="XGLMForCausalLM",
    layouts=(Layout((*BLOCK_NAMES, ("model.norm.", "model.layer_norm."))),),
    carried=lambda c: ("model.embed_positions.weights",),  # in older files
    defaults={
        "activation_function": "gelu",
        **dict.fromkeys(("dropout", "attention_dropout"), 0.1),
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    },
    fixed={"add_cross_attention": False},
    unread={"decoder_start_token_id": "concerns only generation"},
)
def xglm(c: HFConfig) -> ModelSpec:
    width, heads = c.take_count("d_model"), c.take_count("attention_heads")
    if width % heads:
        raise ConfigError(
            f"{c.name}: d_model is {width} and attention_heads {heads}; expected a multiple of these"
        )
    padding, positions = padding_row(c), c.take_count("max_position_embeddings", 2048)
    zero = None if padding is None else padding - UNUSED if padding >= 0 else positions + padding
    dropout, dim, norm = c.take_dropout("dropout"), width // heads, LayerNormSpec(eps=1e-5)
    dropped = c.take_dropout("attention_dropout")
    attn = AttentionSpec(heads, heads, dim, dim**-0.5, qkv_bias=True, o_bias=True, dropout=dropped)
    act = activation(c, "activation_function", gated=False)
    mlp = MLPSpec(c.take_count("ffn_dim"), act, bias=True, gated=False)
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=(BlockSpec(attn, mlp, norm, dropout=dropout),) * c.take_count("num_layers"),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("init_std", 0.02),
        padding_idx=padding,
        embed_scale=width**0.5 if c.take_flag("scale_embedding", True) else 1.0,
        round_embed_scale=False,
        embed_dropout=dropout,
        sinusoidal_positions=True,
        unused_positions=UNUSED,
        zero_position=None if zero is None or zero < 0 else zero,  # the table's row of the padding id
    )


# -- tests

for_tests(
    "xglm",
    tiny={
        "rms_norm_eps": ...,
        "hidden_act": ...,
        "activation_function": "gelu",
        "hidden_size": ...,
        "d_model": 64,
        "intermediate_size": ...,
        "ffn_dim": 80,
        "num_hidden_layers": ...,
        "num_layers": 3,
        "num_attention_heads": ...,
        "attention_heads": 4,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "rope_parameters": ...,
        "initializer_range": ...,
        "init_std": 0.03,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
    },
    variants={"relu": {"activation_function": "relu"}},
    skip={
        f"swap:model.layers.{i}.self_attn.k_proj.bias": "without rotation it has no effect" for i in range(3)
    },
)
