"""BLOOM (BigScience, 2022, arXiv:2211.05100): attention with biases by distance (ALiBi), a norm of the
embeddings, LayerNorm, a plain MLP with GELU, and biases everywhere.
"""

from liger_models.architectures.common import alibi_slopes
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

NAMES = (
    *(("embed_tokens.", "word_embeddings."), ("embed_norm.", "word_embeddings_layernorm.")),
    *((".layers.", ".h."), ("transformer.norm.", "transformer.ln_f.")),
    *((".self_attn.o_proj.", ".self_attention.dense."), (".self_attn.", ".self_attention.")),
    *((".mlp.up_proj.", ".mlp.dense_h_to_4h."), (".mlp.down_proj.", ".mlp.dense_4h_to_h.")),
)
BY_HEAD = Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="heads")


@register(
    "bloom",
    reference="BloomForCausalLM",
    layouts=(Layout(NAMES, root="transformer.", joined=(BY_HEAD,)),),
    defaults={"tie_word_embeddings": True},
    unread={
        **dict.fromkeys(("pretraining_tp", "slow_but_exact"), "concerns only the order of sums"),
        **dict.fromkeys(
            (
                *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
                *("offset_alibi", "skip_bias_add", "seq_length"),
            ),
            "not read by the reference",
        ),
    },
)
def bloom(c: HFConfig) -> ModelSpec:
    width, heads = c.take_count(("n_embed", "hidden_size")), c.take_count(("n_head", "num_attention_heads"))
    if width % heads:
        raise ConfigError(
            f"{c.name}: hidden_size is {width} and n_head {heads}; expected a multiple of n_head"
        )
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    dim, slopes = width // heads, alibi_slopes(heads)
    attn = AttentionSpec(heads, heads, dim, dim**-0.5, qkv_bias=True, o_bias=True, slopes=slopes)
    block = BlockSpec(attn, MLPSpec(4 * width, "gelu_tanh", bias=True, gated=False), norm)
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=(block,) * c.take_count(("n_layer", "num_hidden_layers")),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("initializer_range", 0.02),
        padding_has_positions=False,
        embed_norm=norm,
    )


# -- tests

for_tests(
    "bloom",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_epsilon": 1e-4,
        "hidden_act": ...,
        "intermediate_size": ...,
        "num_hidden_layers": ...,
        "n_layer": 3,
        "num_attention_heads": ...,
        "n_head": 4,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "max_position_embeddings": ...,
        "rope_parameters": ...,
        "tie_word_embeddings": True,
    },
    variants={"heads that are not a power of two": {"n_head": 6}},
    skip={
        "positions:given": "the reference has no positions",
        **dict.fromkeys(("key:n_embed", "key:num_attention_heads", "key:num_hidden_layers"), "another name"),
        **{
            f"swap:model.layers.{i}.self_attn.k_proj.bias": "without rotation it has no effect"
            for i in range(3)
        },
    },
)
