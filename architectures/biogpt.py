"""BioGPT (Microsoft, 2022, arXiv:2210.10341): OPT's form with GELU and scaled embeddings, trained on
abstracts of biomedical papers.
"""

from dataclasses import replace

from liger_models.architectures.common import attention_as_wide_as_the_model, decoder, mlp
from liger_models.architectures.opt import BLOCK_NAMES
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LayerNormSpec, ModelSpec

NAMES = (*BLOCK_NAMES, ("biogpt.norm.", "biogpt.layer_norm."), ("lm_head.", "output_projection."))


@register(
    "biogpt",
    reference="BioGptForCausalLM",
    layouts=(Layout(NAMES, root="biogpt."),),
    defaults={
        "max_position_embeddings": 1024,
        "hidden_act": "gelu",
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
        "pad_token_id": 1,
        "tie_word_embeddings": True,
    },
    unread={"layer_norm_eps": "not read by the reference, whose norms have 1e-5"},
)
def biogpt(c: HFConfig) -> ModelSpec:
    norm, dropout = LayerNormSpec(eps=1e-5), c.take_dropout("hidden_dropout_prob")
    heads = c.take_count("num_attention_heads")
    attn = attention_as_wide_as_the_model(c, kv_heads=heads, bias=True, positions=False)
    attn = replace(attn, dropout=c.take_dropout("attention_probs_dropout_prob"))
    block = BlockSpec(attn, mlp(c, bias=True, gated=False), norm, dropout=dropout)
    return decoder(
        c,
        [block] * c.take_count("num_hidden_layers"),
        norm,
        embed_scale=c.take_count("hidden_size") ** 0.5 if c.take_flag("scale_embedding", True) else 1.0,
        round_embed_scale=False,
        embed_dropout=dropout,
        learned_positions=c.take_count("max_position_embeddings"),
        unused_positions=2,
    )


# -- tests

for_tests(
    "biogpt",
    tiny={
        "rms_norm_eps": ...,
        "hidden_act": "gelu",
        "hidden_size": 64,
        "num_key_value_heads": ...,
        "head_dim": ...,
        "rope_parameters": ...,
        "scale_embedding": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
    },
    variants={"relu": {"hidden_act": "relu"}},
    skip={
        "key:head_dim": "heads are as wide together as the hidden state, which is checked",
        **{
            f"swap:model.layers.{i}.self_attn.k_proj.bias": "without rotation it has no effect"
            for i in range(3)
        },
    },
)
