"""GPT (Radford et al., 2018): learned positions, a norm after each sum and none at the end, a plain MLP with
GELU, and biases everywhere; checkpoints hold transposed matrices.
"""

from liger_models.architectures.gpt2 import DROPOUTS, MASKS, PACKED, SKIP, SUMMARY, TRANSPOSED
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    Activation,
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    MLPSpec,
    ModelSpec,
)

NAMES = (
    *(("embed_tokens.", "tokens_embed."), ("embed_positions.", "positions_embed."), ("layers.", "h.")),
    *((".self_attn.qkv_proj.", ".attn.c_attn."), (".self_attn.o_proj.", ".attn.c_proj.")),
    *((".post_attention_layernorm.", ".ln_1."), (".post_feedforward_layernorm.", ".ln_2.")),
    *((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
)
# What the reference calls gelu is the approximation by tanh.
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


@register(
    "openai-gpt",
    reference="OpenAIGPTLMHeadModel",
    layouts=tuple(Layout(NAMES, PACKED, TRANSPOSED, root=root) for root in ("", "transformer.")),
    carried=lambda c: MASKS,
    defaults={"n_positions": 512, "afn": "gelu", "tie_word_embeddings": True, **dict.fromkeys(DROPOUTS, 0.1)},
    unread={
        **SUMMARY,
        "n_ctx": "not read by the reference",
        "n_special": "counts ids that the vocabulary has in any case",
        "predict_special_tokens": "the head has a row for every id",
    },
)
def openai_gpt(c: HFConfig) -> ModelSpec:
    width, heads, name = c.take_count("n_embd"), c.take_count("n_head"), c.take("afn")
    if width % heads:
        raise ConfigError(f"{c.name}: n_embd is {width} and n_head {heads}; expected a multiple of n_head")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"{c.name}: afn must be one of {', '.join(ACTIVATIONS)}, found {name!r}")
    head_dim, norm = width // heads, LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    of_branches, of_embeddings, of_weights = (c.take_dropout(key) for key in DROPOUTS)
    attn = AttentionSpec(
        *(heads, heads, head_dim, head_dim**-0.5), qkv_bias=True, o_bias=True, dropout=of_weights
    )
    mlp = MLPSpec(4 * width, ACTIVATIONS[name], bias=True, gated=False)
    block = BlockSpec(attn, mlp, norm, topology="normed_sums", dropout=of_branches)
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=(block,) * c.take_count("n_layer"),
        norm=None,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("initializer_range", 0.02),
        learned_positions=c.take_count("n_positions"),
        embed_dropout=of_embeddings,
    )


# -- tests

for_tests(
    "openai-gpt",
    tiny={
        **{"rms_norm_eps": ..., "hidden_size": ..., "intermediate_size": ..., "num_hidden_layers": ...},
        **{"num_attention_heads": ..., "num_key_value_heads": ..., "head_dim": ..., "rope_parameters": ...},
        **{"hidden_act": ..., "max_position_embeddings": ..., "layer_norm_epsilon": 1e-4, "afn": "gelu"},
        **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
        **dict.fromkeys(DROPOUTS, 0.0),
    },
    variants={"silu": {"afn": "silu"}, "relu": {"afn": "relu"}},
    skip={
        "field:AttentionSpec.scale": "scores of the first layer, whose input is no norm's output, are small",
        **SKIP,
    },
)
