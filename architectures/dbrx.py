"""DBRX (Databricks, 2024): sixteen experts per layer, four of them per token, LayerNorms without biases, and
clamped queries, keys and values. Checkpoints hold the experts of a layer in three matrices.
"""

from liger_models.architectures.common import experts_and_chosen, padding_row
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, ModelSpec, MoESpec, RopeSpec

NAMES = (
    *(("embed_tokens.", "wte."), (".layers.", ".blocks."), ("transformer.norm.", "transformer.norm_f.")),
    *((".self_attn.", ".norm_attn_norm.attn."), (".qkv_proj.", ".Wqkv."), (".o_proj.", ".out_proj.")),
    *((".input_layernorm.", ".norm_attn_norm.norm_1."), (".mlp.router.", ".ffn.router.layer.")),
    (".post_attention_layernorm.", ".norm_attn_norm.norm_2."),
    *((".experts.down_proj", ".experts.w2"), (".mlp.experts.", ".ffn.experts.mlp.")),
)
LAYOUT = Layout(
    NAMES,
    whole=("*.qkv_proj.*", "*.experts.*"),
    permuted=(("*.experts.?1", "(e i) h -> e i h"), ("*.experts.down_proj", "(e i) h -> e h i")),
    apart=(("*.experts.gate_up_proj", ("w1", "v1")),),
    root="transformer.",
)


@register(
    "dbrx",
    reference="DbrxForCausalLM",
    layouts=(LAYOUT,),
    defaults={"max_seq_len": 2048},
    unread={"num_key_value_heads": "kv_n_heads counts"},
)
def dbrx(c: HFConfig) -> ModelSpec:
    norm, own = LayerNormSpec(eps=1e-5, bias=False), c.part("ffn_config")
    own.take_only(ffn_act_fn={"name": "silu"}, moe_normalize_expert_weights=1.0)
    own.take("hidden_size", None)  # the model's counts
    coef = own.take_number("moe_loss_weight", 0.01)
    moe = MoESpec(
        *experts_and_chosen(own, ("moe_num_experts",), ("moe_top_k",)),
        intermediate_size=own.take_count("ffn_hidden_size"),
        renormalize_eps=0.0,
        input_noise=own.take_number("moe_jitter_eps", 0.0),
        aux_loss_coef=coef if c.take_flag("output_router_logits", False) else 0.0,
    )
    block = BlockSpec(attention(c), moe, norm, dropout=c.take_dropout("resid_pdrop"))
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=c.take_count("d_model"),
        blocks=(block,) * c.take_count("n_layers"),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", False),
        initializer_range=c.take_number("initializer_range", 0.02),
        padding_idx=padding_row(c),
        embed_dropout=c.take_dropout("emb_pdrop"),
    )


def attention(c: HFConfig) -> AttentionSpec:
    """Attention, whose `rope_theta` is only in `attn_config` in released files. For these, transformers 5
    computes with its default for `rope_parameters`; we do as the models were trained.
    """
    own, width, heads = c.part("attn_config"), c.take_count("d_model"), c.take_count("n_heads")
    kv_heads, theta = own.take_count("kv_n_heads", 1), own.take_number("rope_theta", positive=True)
    if width % heads or heads % kv_heads:
        raise ConfigError(
            f"{c.name}: n_heads {heads} must divide d_model {width}, and kv_n_heads divide n_heads"
        )
    rotary = c.take_rope(default_theta=theta)
    if (rotary["rope_type"], rotary["rope_theta"], rotary["partial_rotary_factor"]) != ("default", theta, 1):
        raise ConfigError(
            f"{c.name}: rope_theta is {theta:g} in attn_config, but the other rotary settings are {rotary}; "
            f"expected none, or rope_parameters={{'rope_type': 'default', 'rope_theta': {theta:g}}}"
        )
    rope = RopeSpec(width // heads, theta, max_position_embeddings=c.take_count("max_seq_len"))
    scale, limit = (width // heads) ** -0.5, own.take_number("clip_qkv", positive=True)
    dropout = own.take_dropout("attn_pdrop")
    return AttentionSpec(heads, kv_heads, rope.dim, scale, rope, qkv_limit=limit, dropout=dropout)


# -- tests

ATTENTION = {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0}
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
EXPERTS = {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2, "moe_loss_weight": 0.5}

for_tests(
    "dbrx",
    tiny={
        **dict.fromkeys(("rms_norm_eps", "hidden_act", "hidden_size", "intermediate_size", "head_dim"), ...),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), ...),
        **{"d_model": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": ..., "max_seq_len": 128},
        "rope_parameters": ...,
        "attn_config": ATTENTION,
        "ffn_config": EXPERTS,
        "output_router_logits": False,
    },
    variants={
        "another_theta": {
            "attn_config": {**ATTENTION, "rope_theta": 500.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    skip={
        "rope:all": "the reference has attn_config's theta and others",
        **{f"key:{key}": "agrees with attn_config's theta, or is refused" for key in ROPE_KEYS},
        **dict.fromkeys(
            ("variant:tie_word_embeddings=True", "key:tie_word_embeddings"), "the reference refuses it"
        ),
        "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
    },
)
