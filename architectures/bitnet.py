"""BitNet b1.58 (Wang et al., 2025, arXiv:2504.12285): LLaMA with gated squared ReLUs, and a norm before each
output projection; its checkpoints ask for weights of three values (layers/projections/ternary.py).
"""

from dataclasses import replace

from liger_models.architectures.common import activation, attention_as_wide_as_the_model, decoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec

NAMES = ((".self_attn.o_norm.", ".self_attn.attn_sub_norm."), (".mlp.down_norm.", ".mlp.ffn_sub_norm."))


@register(
    "bitnet",
    reference="BitNetForCausalLM",
    layouts=(Layout(NAMES),),
    defaults={"max_position_embeddings": 2048, "hidden_act": "relu2", "num_key_value_heads": 5},
)
def bitnet(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention_as_wide_as_the_model(c, bias=c.take_flag("attention_bias", False), theta=500000.0)
    feed_forward = MLPSpec(c.take_count("intermediate_size"), activation(c, also=("relu2",)), down_norm=norm)
    block = BlockSpec(replace(attn, out_norm=norm), feed_forward, norm)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm)


# -- tests

for_tests(
    "bitnet",
    # The norm of the input of down hides scales before it, unless its epsilon is large.
    tiny={"hidden_act": "relu2", "head_dim": ..., "attention_bias": True, "rms_norm_eps": 0.05},
    skip={"key:head_dim": "heads are as wide together as the hidden state, which is checked"},
)
