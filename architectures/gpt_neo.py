"""GPT-Neo (EleutherAI, 2021): GPT-2 with separate projections, scores that are not scaled, and a sliding
window on every other layer.
"""

from dataclasses import replace

from liger_models.architectures.common import activation
from liger_models.architectures.gpt2 import SUMMARY
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

NAMES = (
    *(("embed_tokens.", "wte."), ("embed_positions.", "wpe."), (".layers.", ".h.")),
    *((".self_attn.o_proj.", ".attn.attention.out_proj."), (".self_attn.", ".attn.attention.")),
    *((".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2.")),
    *((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
    ("transformer.norm.", "transformer.ln_f."),
)


@register(
    "gpt_neo",
    reference="GPTNeoForCausalLM",
    layouts=(Layout(NAMES, root="transformer."),),
    carried=lambda c: ("*.attn.attention.bias", "*.attn.attention.masked_bias"),  # masks, in older files
    defaults={
        "max_position_embeddings": 2048,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    fixed={"resid_dropout": 0, "embed_dropout": 0},
    unread={**SUMMARY, "is_causal": "its own mask hides later tokens"},
)
def gpt_neo(c: HFConfig) -> ModelSpec:
    width, heads = c.take_count("hidden_size"), c.take_count("num_heads")
    if width % heads:
        raise ConfigError(f"{c.name}: hidden_size is {width} and num_heads {heads}; expected a multiple")
    act = activation(c, "activation_function", gated=False)
    mlp = MLPSpec(c.take_count("intermediate_size", 4 * width), act, bias=True, gated=False)
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    attn = AttentionSpec(heads, heads, width // heads, scale=1.0, o_bias=True)
    window = c.take_count("window_size", 256)
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=tuple(
            BlockSpec(replace(attn, window=window if kind == "local" else None), mlp, norm)
            for kind in attention_types(c)
        ),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", True),
        initializer_range=c.take_number("initializer_range", 0.02),
        learned_positions=c.take_count("max_position_embeddings"),
    )


def attention_types(c: HFConfig) -> list[str]:
    """Type of each layer, "global" or "local", from `attention_types`: lists of types and how often each is
    repeated.

    Raises:
        ConfigError: not one type per layer, or `attention_layers` says otherwise.
    """
    count, stated = c.take_count("num_layers"), c.take("attention_types", [[["global", "local"], 12]])
    try:
        found = [kind for kinds, times in stated for _ in range(times) for kind in kinds]
    except (TypeError, ValueError):
        found = []
    if len(found) != count or not set(found) <= {"global", "local"}:
        raise ConfigError(
            f"{c.name}: attention_types must give each of the {count} layers one of 'global' and 'local', as "
            f"in [[['global', 'local'], {count // 2}]], found {abbreviate(stated)}"
        )
    c.take_only(attention_layers=found)
    return found


# -- tests

for_tests(
    "gpt_neo",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_epsilon": 1e-4,
        "hidden_act": ...,
        "activation_function": "gelu_new",
        "num_hidden_layers": ...,
        "num_layers": 3,
        "attention_types": [[["local"], 1], [["global", "local"], 1]],
        "num_attention_heads": ...,
        "num_heads": 4,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "window_size": 7,
        "rope_parameters": ...,
        "tie_word_embeddings": True,
    },
    variants={"gelu": {"activation_function": "gelu"}},
    skip={"key:attention_layers": "follows from attention_types, and is checked"},
)
