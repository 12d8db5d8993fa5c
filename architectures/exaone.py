"""EXAONE 3, 3.5 and Deep (LG AI Research, 2024, arXiv:2408.03541; 2412.04862; 2503.12524): LLaMA's layers
under other names in config.json and checkpoints.
"""

from liger_models.architectures.llama import of_llamas_layers
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

NAMES = (
    *((".embed_tokens.", ".wte."), (".layers.", ".h."), ("transformer.norm.", "transformer.ln_f.")),
    *((".input_layernorm.", ".ln_1."), (".post_attention_layernorm.", ".ln_2.")),
    *((".self_attn.o_proj.", ".self_attn.out_proj."), (".self_attn.", ".attn.attention.")),
    *((".mlp.gate_proj.", ".mlp.c_fc_0."), (".mlp.up_proj.", ".mlp.c_fc_1.")),
    (".mlp.down_proj.", ".mlp.c_proj."),
)


@register(
    "exaone",
    reference="LlamaForCausalLM",
    reference_of="llama",
    layouts=(Layout(NAMES, root="transformer."), Layout()),
    other_names={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    defaults={
        **{"num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        "pad_token_id": 0,
    },
)
def exaone(c: HFConfig) -> ModelSpec:
    return of_llamas_layers(c, theta=5e5)


# -- tests

for_tests(
    "exaone",
    tiny={"attention_bias": True, "mlp_bias": True},
    variants={
        "no_bias": {"attention_bias": False, "mlp_bias": False},
        "own names": {
            **{"num_hidden_layers": ..., "num_layers": 2, "rms_norm_eps": ..., "layer_norm_epsilon": 1e-3},
            **{"hidden_act": ..., "activation_function": "gelu", "embed_dropout": 0.0},
        },
    },
)
