"""CodeGen (Nijkamp et al., 2022, arXiv:2203.13474): GPT-J for code; checkpoints hold queries, values and keys
in four groups of heads.
"""

from liger_models.architectures.gpt2 import SIZES, SUMMARY
from liger_models.architectures.gptj import NAMES, gptj
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

GROUPS = 4  # the cores of a TPU on which the models were trained
QKV = Joined("qkv_proj", ("q_proj", "v_proj", "k_proj"), by=GROUPS)


@register(
    "codegen",
    reference="CodeGenForCausalLM",
    layouts=(Layout(NAMES, root="transformer.", joined=(QKV,)),),
    carried=lambda c: ("*.attn.causal_mask", "*.attn.bias", "*.attn.masked_bias"),  # masks, in older files
    defaults={"activation_function": "gelu_new", "n_positions": 2048, "rotary_dim": 64},
    unread={
        **SUMMARY,
        **dict.fromkeys(("n_ctx", "rotary", "scale_attn_weights"), "not read by the reference"),
    },
)
def codegen(c: HFConfig) -> ModelSpec:
    if (heads := c.take_count("n_head")) % GROUPS:
        raise ConfigError(
            f"{c.name}: n_head is {heads}; expected a multiple of {GROUPS}, the groups of heads"
        )
    return gptj(c)


# -- tests

for_tests(
    "codegen",
    tiny={**SIZES, "n_embd": 96, "n_head": 8, "rotary_dim": 8},
    variants={"gelu": {"activation_function": "gelu"}, "whole_heads": {"rotary_dim": 12}},
    skip={"rope:all": "the reference has only the default type"},
)
