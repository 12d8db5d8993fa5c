"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain MLP with GELU, and biases everywhere;
checkpoints hold transposed matrices.
"""

from dataclasses import replace

from liger_models.architectures.common import activation
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec, Normal

NAMES = (
    *(("embed_tokens.", "wte."), ("embed_positions.", "wpe."), ("layers.", "h.")),
    *((".self_attn.qkv_proj.", ".attn.c_attn."), (".self_attn.o_proj.", ".attn.c_proj.")),
    *((".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2.")),
    *((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
)
PACKED = ("*.qkv_proj.*",)
TRANSPOSED = tuple((f"*.{name}_proj.weight", "i o -> o i") for name in ("qkv", "o", "up", "down"))
MASKS = ("*.attn.bias", "*.attn.masked_bias")  # in older files
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DEFAULTS = {"n_positions": 1024, "tie_word_embeddings": True, **dict.fromkeys(DROPOUTS, 0.1)}
SUMMARY_KEYS = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
SUMMARY = {f"summary_{key}": "only other tasks sum up a sequence" for key in SUMMARY_KEYS}


def layouts(permuted: tuple[tuple[str, str], ...] = ()) -> tuple[Layout, ...]:
    """Layouts of a base model's files, and of a language model's."""
    return (
        Layout((*NAMES, ("norm.", "ln_f.")), PACKED, permuted, root=""),
        Layout((*NAMES, ("transformer.norm.", "transformer.ln_f.")), PACKED, permuted, root="transformer."),
    )


@register(
    "gpt2",
    reference="GPT2LMHeadModel",
    layouts=layouts(TRANSPOSED),
    carried=lambda c: MASKS,
    defaults={**DEFAULTS, "activation_function": "gelu_new"},
    unread={**SUMMARY, "reorder_and_upcast_attn": "scores are float32", "n_ctx": "not read by the reference"},
)
def gpt2(c: HFConfig) -> ModelSpec:
    by_layer = c.take_flag("scale_attn_by_inverse_layer_idx", False)
    return with_learned_positions(c, c.take_count("n_head"), by_layer)


def with_learned_positions(c: HFConfig, kv_heads: int, by_layer: bool = False) -> ModelSpec:
    """A model of GPT-2's form; `by_layer` divides the scores by the number of the layer, from 1."""
    width, heads = c.take_count("n_embd"), c.take_count("n_head")
    head_dim, layers = width // heads, c.take_count("n_layer")
    if width % heads:
        raise ConfigError(f"{c.name}: n_embd is {width} and n_head {heads}; expected a multiple of n_head")
    scale = head_dim**-0.5 if c.take_flag("scale_attn_weights", True) else 1.0
    act = activation(c, "activation_function", gated=False)
    mlp = MLPSpec(c.take_count("n_inner", 4 * width), act, bias=True, gated=False)
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    of_branches, of_embeddings, of_weights = (c.take_dropout(key) for key in DROPOUTS)
    attn = AttentionSpec(heads, kv_heads, head_dim, scale, qkv_bias=True, o_bias=True, dropout=of_weights)
    scales = [scale / (i + 1) if by_layer else scale for i in range(layers)]
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    std = c.take_number("initializer_range", 0.02)
    branches = Normal(std / (2 * layers) ** 0.5)
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=tuple(BlockSpec(replace(attn, scale=own), mlp, norm, dropout=of_branches) for own in scales),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=std,
        learned_positions=c.take_count("n_positions"),
        embed_dropout=of_embeddings,
        fresh=(("*.o_proj.weight", branches), ("*.down_proj.weight", branches)),
    )


# -- tests

SIZES = {  # under GPT-2's names
    "rms_norm_eps": ...,
    "layer_norm_epsilon": 1e-4,
    "hidden_act": ...,
    "activation_function": "gelu_new",
    "hidden_size": ...,
    "n_embd": 64,
    "intermediate_size": ...,
    "n_inner": 80,
    "num_hidden_layers": ...,
    "n_layer": 3,
    "num_attention_heads": ...,
    "n_head": 4,
    "num_key_value_heads": ...,
    "head_dim": ...,
    "max_position_embeddings": ...,
    "n_positions": 128,
    "rope_parameters": ...,
}
TINY = {
    **SIZES,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    **dict.fromkeys(DROPOUTS, 0.0),
}
VARIANTS = {"gelu": {"activation_function": "gelu"}}
SKIP = {
    f"swap:model.layers.{i}.self_attn.k_proj.bias": "without rotation it shifts all scores of a query alike"
    for i in range(3)
}

for_tests("gpt2", tiny={**TINY, "scale_attn_by_inverse_layer_idx": True}, variants=VARIANTS, skip=SKIP)
