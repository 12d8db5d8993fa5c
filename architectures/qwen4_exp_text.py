"""Qwen4, experimental (Qwen Team, 2026), text models: several residual streams with gates per channel, n-gram
embeddings, linear attention, and attention to blocks of keys that an indexer chooses.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import (
    FULL,
    chosen_experts,
    decoder,
    expert_layouts,
    gated_delta,
    mixers,
)
from liger_models.architectures.common.qwen4 import indexed, ngrams
from liger_models.architectures.qwen3_5_text import DEFAULTS, SKIP, centred_norm, gated_attention
from liger_models.architectures.qwen3_5_text import TINY as LINEAR
from liger_models.architectures.qwen3_next import EXPERTS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    BlockSpec,
    Constant,
    GatedStreamsSpec,
    MLPSpec,
    ModelSpec,
)


def layouts(*renames: tuple[str, str], **settings: Any) -> tuple[Layout, ...]:
    """Layouts of checkpoints: experts apart or packed, and the tables of n-grams in pieces or whole."""
    names = (*renames, ("model.norm.", "model.hyper_connection_mixer."))
    apart, packed = (replace(one, **settings) for one in expert_layouts(*names))
    return apart, packed, replace(packed, whole=(*packed.whole, "*.ngram_embedding.weight"))


@register(
    "qwen4_exp_text",
    reference="Qwen4ExpForCausalLM",
    layouts=layouts(),
    defaults={
        **DEFAULTS,
        **{"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        **{"num_experts": 512, "num_experts_per_tok": 10, "router_aux_loss_coef": 0.001, "hc_count": 4},
        **{"hc_lowrank": 320, "ngram_vocab_size_base": 20_000_000, "seed": 1234, "split_ngram_parts": 512},
        **{"make_ngram_vocab_size_divisible_by": 128},
    },
    carried=lambda c: ("mtp.*",),
    fixed={"indexer_kv_heads": 1},
    unread={"number_of_conv_states": "the number of states in a cache, which follows from the layers"},
)
def qwen4_exp_text(c: HFConfig) -> ModelSpec:
    norm = centred_norm(c)
    experts = chosen_experts(c, renormalize=c.take_flag("norm_topk_prob", True))
    shared = MLPSpec(c.take_count("shared_expert_intermediate_size"), "silu")
    experts = replace(experts, shared_expert=shared, shared_gate=True)
    gate: Any = c.take_choice("output_gate_type", "silu", "sigmoid")
    linear = gated_delta(c, "qkv", norm.eps, gate_activation=gate)
    attn = indexed(c, gated_attention(c, norm, 1.0, text_of_images=True))
    kinds = mixers(c, linear, attn, ("indexed_attention", FULL))
    own = ngrams(c, [kind == linear for kind in kinds])
    streams = GatedStreamsSpec(c.take_count("hc_count"), c.take_count("hc_lowrank"))
    blocks = [
        BlockSpec(kind, experts, norm, "gated_streams", streams=streams, ngrams=own.get(layer))
        for layer, kind in enumerate(kinds)
    ]
    return decoder(c, blocks, norm, fresh=(("*.ple.conv1d.weight", Constant(0.0)),))


# -- tests

TINY: dict[str, Any] = {
    **LINEAR,
    **EXPERTS,
    **{
        "intermediate_size": ...,
        "norm_topk_prob": True,
        "eos_token_id": 7,
        "output_gate_type": "sigmoid",
    },
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    **{"hc_count": 2, "hc_lowrank": 10, "indexer_kv_heads": 1},
    **{"indexer_n_heads": 5, "indexer_head_dim": 18, "indexer_budget": 6, "indexer_compress_ratio": 2},
    **{"ple_layer_ids": [3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3, "ngram_size": 4},
    **{"heads_per_ngram": 2, "ngram_vocab_size_base": 30, "make_ngram_vocab_size_divisible_by": 8},
    **{"split_ngram_parts": 2, "seed": 5},
}

for_tests(
    "qwen4_exp_text",
    tiny=TINY,
    variants={
        "every_second": {"layer_types": ..., "full_attention_interval": 2, "ple_layer_ids": [1]},
        "n-grams twice": {"ple_layer_ids": [1, 3], "hc_count": 3},
        "without n-grams": {"ple_layer_ids": []},
        "no block is left out": {"indexer_budget": 64},
        "whole heads turn": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    },
    skip={
        **SKIP,
        "refusal:mrope": "text has one position on all axes",
        "key:num_local_experts": "another name of num_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
        "field:NgramSpec.table_sizes": "checkpoints have them",
        "field:NgramSpec.factors": "checkpoints have them",
        "field:NgramSpec.pieces": "of the table in checkpoints",
        "swap:model.layers.2.ple.norm_key.weight": "only the product of both counts",
    },
)
