"""StarCoder 2 (Lozhkov et al., 2024, arXiv:2402.19173): LayerNorm, a plain MLP, one switch for all biases,
and a sliding window.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec

UNREAD = (
    *("mlp_type", "norm_type", "activation_function", "layer_norm_epsilon", "rms_norm_eps"),
    *("scale_attn_weights", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)


@register(
    "starcoder2",
    reference="Starcoder2ForCausalLM",
    layouts=(Layout(rename=((".up_proj.", ".c_fc."), (".down_proj.", ".c_proj."))),),
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "tie_word_embeddings": True,
    },
    unread=dict.fromkeys(UNREAD, "the reference does not read it"),
)
def starcoder2(c: HFConfig) -> ModelSpec:
    norm, bias = LayerNormSpec(eps=c.take_number("norm_epsilon", 1e-5)), c.take_flag("use_bias", True)
    attn = attention(c, bias=bias, window=c.take_count("sliding_window", None))
    attn = replace(attn, dropout=c.take_dropout("attention_dropout"))
    dropout, of_embeddings = c.take_dropout("residual_dropout"), c.take_dropout("embedding_dropout")
    block = BlockSpec(attn, mlp(c, bias=bias, gated=False), norm, dropout=dropout)
    return decoder(c, [block] * c.take_count("num_hidden_layers"), norm, embed_dropout=of_embeddings)


# -- tests

for_tests(
    "starcoder2",
    tiny={
        "rms_norm_eps": ...,
        "norm_epsilon": 1e-4,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
)
