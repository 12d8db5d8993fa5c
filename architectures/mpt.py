"""MPT (MosaicML, 2023): attention with biases by distance (ALiBi), LayerNorm and a plain MLP with GELU,
without biases; queries, keys and values may be clamped.
"""

from liger_models.architectures.common import alibi_slopes
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

NAMES = (
    *(("embed_tokens.", "wte."), (".layers.", ".blocks."), ("transformer.norm.", "transformer.norm_f.")),
    *((".self_attn.qkv_proj.", ".attn.Wqkv."), (".self_attn.o_proj.", ".attn.out_proj.")),
    *((".input_layernorm.", ".norm_1."), (".post_attention_layernorm.", ".norm_2."), (".mlp.", ".ffn.")),
)
MODEL_TYPE = {"model_type": "mpt"}


@register(
    "mpt",
    reference="MptForCausalLM",
    layouts=(Layout(NAMES, ("*.qkv_proj.*",), root="transformer."),),
    defaults={"tie_word_embeddings": True, "max_seq_len": 2048},
    fixed={"expansion_ratio": 4, "no_bias": True, "embedding_fraction": 1.0},
    unread={
        **dict.fromkeys(("init_device", "init_config", "verbose"), "not read by the reference"),
        "learned_pos_emb": "the reference has no such table",
        "norm_type": "the reference has one type",
        **dict.fromkeys(("emb_pdrop", "resid_pdrop"), "the reference drops nothing there"),
        "max_seq_len": "slopes have no limit",
    },
)
def mpt(c: HFConfig) -> ModelSpec:
    width, heads = c.take_count("d_model"), c.take_count("n_heads")
    if width % heads:
        raise ConfigError(f"{c.name}: d_model is {width} and n_heads {heads}; expected a multiple of n_heads")
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5), bias=False)
    block = BlockSpec(attention(c, heads, width // heads), MLPSpec(4 * width, "gelu", gated=False), norm)
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=(block,) * c.take_count("n_layers"),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("initializer_range", 0.02),
    )


def attention(c: HFConfig, heads: int, head_dim: int) -> AttentionSpec:
    """Attention as `attn_config` describes it."""
    nested = c.part("attn_config") if c.take("attn_config", None) is not None else c.with_raw(MODEL_TYPE)
    nested.take("attn_impl", None)
    nested.take_only(attn_type="multihead_attention", alibi=True, alibi_bias_max=8)
    scale = nested.take_number("softmax_scale", None)
    limit = nested.take_number("clip_qkv", None)
    return AttentionSpec(
        heads,
        heads,
        head_dim,
        head_dim**-0.5 if scale is None else scale,
        qkv_limit=limit or None,
        slopes=alibi_slopes(heads, interleaved=True),
    )


# -- tests

for_tests(
    "mpt",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_epsilon": 1e-4,
        "hidden_act": ...,
        "hidden_size": ...,
        "d_model": 48,
        "intermediate_size": ...,
        "num_hidden_layers": ...,
        "n_layers": 3,
        "num_attention_heads": ...,
        "n_heads": 4,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "max_position_embeddings": ...,
        "max_seq_len": 128,
        "rope_parameters": ...,
        "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3},
        "tie_word_embeddings": True,
    },
    variants={"heads that are not a power of two": {"n_heads": 6, "attn_config": {}}},
    skip={"positions:given": "the reference has no positions"},
)
