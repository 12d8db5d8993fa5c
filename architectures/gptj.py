"""GPT-J (EleutherAI, 2021): attention without biases and a plain MLP with them, in parallel after one
LayerNorm, interleaved rotary on a part of each head, and a bias of the logits.
"""

from liger_models.architectures.common import activation
from liger_models.architectures.gpt2 import SIZES, SUMMARY
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, LayerNormSpec, MLPSpec, ModelSpec, RopeSpec

NAMES = (
    *((".embed_tokens.", ".wte."), (".layers.", ".h."), ("transformer.norm.", "transformer.ln_f.")),
    *((".self_attn.o_proj.", ".attn.out_proj."), (".self_attn.", ".attn."), (".input_layernorm.", ".ln_1.")),
    *((".mlp.up_proj.", ".mlp.fc_in."), (".mlp.down_proj.", ".mlp.fc_out.")),
)


@register(
    "gptj",
    reference="GPTJForCausalLM",
    layouts=(Layout(NAMES, root="transformer."),),
    carried=lambda c: ("*.attn.bias", "*.attn.masked_bias"),  # masks, in older files
    defaults={"activation_function": "gelu_new", "n_positions": 2048, "rotary_dim": 64},
    fixed={"rotary": True, "scale_attn_weights": True},
    unread=SUMMARY,
)
def gptj(c: HFConfig) -> ModelSpec:
    width, heads = c.take_count("n_embd"), c.take_count("n_head")
    head_dim, turning = width // heads, c.take_count("rotary_dim")
    if width % heads:
        raise ConfigError(f"{c.name}: n_embd is {width} and n_head {heads}; expected a multiple of n_head")
    if turning % 2 or turning > head_dim:
        raise ConfigError(
            f"{c.name}: rotary_dim must be even and at most {head_dim}, a head's size, found {turning}"
        )
    rope = RopeSpec(turning, interleaved=True, max_position_embeddings=c.take_count("n_positions"))
    attn = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, rope)
    act = activation(c, "activation_function", gated=False)
    mlp = MLPSpec(c.take_count("n_inner", 4 * width), act, bias=True, gated=False)
    c.take("pad_token_id", None)  # its row has a gradient, as all others
    norm = LayerNormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5))
    return ModelSpec(
        vocab_size=c.take_count("vocab_size"),
        hidden_size=width,
        blocks=(BlockSpec(attn, mlp, norm, topology="parallel"),) * c.take_count("n_layer"),
        norm=norm,
        tie_word_embeddings=c.take_flag("tie_word_embeddings", False),
        initializer_range=c.take_number("initializer_range", 0.02),
        head_bias=True,
    )


# -- tests

for_tests(
    "gptj",
    tiny={**SIZES, "rotary_dim": 8},
    variants={"gelu": {"activation_function": "gelu"}, "whole_heads": {"rotary_dim": 16}},
    skip={"rope:all": "the reference has only the default type"},
)
