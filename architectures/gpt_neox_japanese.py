"""GPT-NeoX Japanese (ABEJA, 2022): GPT-NeoX with one branch after the other, and a bias in only the last
layer's attention.
"""

from dataclasses import replace

from liger_models.architectures.common import activation, attention_as_wide_as_the_model, decoder
from liger_models.architectures.gpt_neox import BUFFERS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, MLPSpec, ModelSpec

NAMES = (
    *((".embed_tokens.", ".embed_in."), ("japanese.norm.", "japanese.final_layer_norm.")),
    *((".self_attn.out_bias", ".attention.dense_bias"), ("lm_head.", "embed_out.")),
    *((".self_attn.o_proj.", ".attention.dense."), (".self_attn.", ".attention.")),
    *((".mlp.up_proj.", ".mlp.dense_h_to_4h."), (".mlp.down_proj.", ".mlp.dense_4h_to_h.")),
)


@register(
    "gpt_neox_japanese",
    reference="GPTNeoXJapaneseForCausalLM",
    layouts=(
        Layout(
            NAMES,
            root="gpt_neox_japanese.",
            joined=(Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="heads"),),
        ),
    ),
    carried=lambda c: BUFFERS,  # in older files
    defaults={
        **{"hidden_act": "gelu", "max_position_embeddings": 2048, "tie_word_embeddings": True},
        **{"attention_dropout": 0.1},
    },
    rope_keys=("rotary_emb_base", "rotary_pct"),
)
def gpt_neox_japanese(c: HFConfig) -> ModelSpec:
    norm, width = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5)), c.take_count("hidden_size")
    attn = attention_as_wide_as_the_model(c, kv_heads=c.take_count("num_attention_heads"), partial=1.0)
    attn = replace(attn, dropout=c.take_dropout("attention_dropout"))
    inner = width * c.take_count("intermediate_multiple_size", 4)
    feed_forward = MLPSpec(inner, activation(c, gated=False), gated=False)
    block = BlockSpec(attn, feed_forward, norm, dropout=c.take_dropout("hidden_dropout"))
    blocks = [block] * c.take_count("num_hidden_layers")
    blocks[-1] = replace(block, mixer=replace(attn, out_bias=True))
    return replace(decoder(c, blocks, norm), padding_idx=None)


# -- tests

for_tests(
    "gpt_neox_japanese",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_act": "gelu_new",
        "hidden_size": 64,
        "intermediate_size": ...,
        "intermediate_multiple_size": 2,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "key:rope_theta": "it may be set in addition to rotary_emb_base, to the same value",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
    },
)
