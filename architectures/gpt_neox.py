"""GPT-NeoX and Pythia (EleutherAI, 2022 and 2023, arXiv:2204.06745, 2304.01373): attention and a plain MLP in
parallel, each after its own LayerNorm, biases everywhere, partial rotary, and checkpoints that interleave
query, key and value by head.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec

NAMES = (
    *((".embed_tokens.", ".embed_in."), ("neox.norm.", "neox.final_layer_norm.")),
    *((".self_attn.o_proj.", ".attention.dense."), (".self_attn.", ".attention.")),
    *((".mlp.up_proj.", ".mlp.dense_h_to_4h."), (".mlp.down_proj.", ".mlp.dense_4h_to_h.")),
    *((".attention_norm.", ".input_layernorm."), (".mlp_norm.", ".post_attention_layernorm.")),
)
IN_MEMORY = Layout(
    NAMES,
    root="gpt_neox.",
    joined=(Joined("query_key_value", ("q_proj", "k_proj", "v_proj"), by="heads"),),
)
BUFFERS = ("*.attention.bias", "*.attention.masked_bias", "*.attention.rotary_emb.inv_freq")


@register(
    "gpt_neox",
    reference="GPTNeoXForCausalLM",
    layouts=(replace(IN_MEMORY, rename=(*NAMES, ("lm_head.", "embed_out."))), IN_MEMORY),
    carried=lambda c: BUFFERS,  # in older files
    defaults={"hidden_act": "gelu", "max_position_embeddings": 2048},
    rope_keys=("rotary_emb_base", "rotary_pct"),
)
def gpt_neox(c: HFConfig) -> ModelSpec:
    norm = LayerNormSpec(eps=c.take_number("layer_norm_eps", 1e-5))
    heads, bias = c.take_count("num_attention_heads"), c.take_flag("attention_bias", True)
    attn = attention_as_wide_as_the_model(c, bias=bias, kv_heads=heads, partial=0.25)
    parallel = c.take_flag("use_parallel_residual", True)
    feed_forward = mlp(c, bias=True, gated=False)
    block = BlockSpec(attn, feed_forward, norm, "parallel_two_norms" if parallel else "pre_norm")
    return replace(decoder(c, [block] * c.take_count("num_hidden_layers"), norm), padding_idx=None)


# -- tests

for_tests(
    "gpt_neox",
    tiny={
        "rms_norm_eps": ...,
        "layer_norm_eps": 1e-4,
        "hidden_act": "gelu_new",
        "hidden_size": 64,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "use_parallel_residual": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    skip={
        "refusal:partial_rotary_factor": "a part of a head may turn",
        "key:rope_theta": "it may be set in addition to rotary_emb_base, to the same value",
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
        **{f"swap:model.layers.{i}.self_attn.o_proj.bias": "only the sum of both counts" for i in range(3)},
    },
)
