"""Hunyuan 4 (Tencent, 2026): gated latent attention with sinks, to keys that indexers choose; four residual
streams that are not mixed; DeepSeek-V3's experts with a clamped activation.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, mlp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_INDEXER,
    TINY_LATENT,
    choices_of_keys,
    corrected_experts,
    corrected_layouts,
    dense_or_sparse,
    indexed_layers,
    latent_attention,
)
from liger_models.architectures.common.mlps import clamped_activation
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, Constant, IndexerSpec, ModelSpec, NormSpec
from liger_models.layers.specs import StreamsSpec as Streams

GATE, STACKED = ".self_attn.g_proj.", corrected_layouts()[1]


def layout(within: str, parts: str = "", *more: tuple[str, str]) -> Layout:
    """With the parameters of connections to streams `within` a module, or with `parts` of it in one."""
    names = (
        (".attn_hc.", f"{within}.hc_attn_layer{parts}.hc_"),
        (".ffn_hc.", f"{within}.hc_mlp_layer{parts}.hc_"),
        (".stream_ends.", f"{within}.hc_head.hc_head_"),
        (".sinks", ".learnable_sink_param"),
    )
    return replace(STACKED, rename=(*names, (GATE, ".self_attn.linear_gate."), *more, *STACKED.rename))


@register(
    "hy_v4",
    reference="HYV4ForCausalLM",
    defaults={
        **{"q_lora_rank": 1536, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827},
        **{"initializer_range": 0.006, "max_position_embeddings": 262144},
        "pad_token_id": 120002,
    },
    layouts=(
        *(layout(""), layout("", ".hc_pre")),
        layout(".hc_pre", "", (".gate_proj.", ".linear_gate.")),  # as transformers saves models
        replace(
            STACKED,
            rename=((".stream_ends.", ".hc_head.hc_"), (GATE, ".self_attn.gate_proj."), *STACKED.rename),
        ),
    ),
    carried=lambda c: ("model.mtp_layers.*",),
    unread={"output_router_logits": "the reference returns them, and adds nothing to the loss"},
)
def hy_v4(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    indexed_layers(c)
    mixer = replace(latent_attention(c, interleaved=False), gates="channels", sinks=True)
    heads, dim, top_k = (c.take_count(f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    indexer = IndexerSpec(heads, dim, top_k, rotates_last=True, norm_eps=norm.eps, float32_weights=True)
    mixers = [mixer] * c.take_count("num_hidden_layers")
    mixers = choices_of_keys(c, mixers, indexer, lambda i: "shared" if i and (i - 1) % 4 else "full")
    sparse = replace(corrected_experts(c), activation=clamped_activation(c))
    mlps = dense_or_sparse(c, mlp(c), sparse, 1)
    eps, magnitude = c.take_number("hc_eps", 1e-6), c.take_number("hc_magnitude", 2.0)
    streams = Streams(c.take_count("hc_mult", 4), 0, eps, norm.eps, magnitude)
    layers = zip(mixers, mlps, strict=True)
    blocks = [BlockSpec(*parts, norm, "hyper_connected", streams=streams) for parts in layers]
    sinks = Constant(c.take_number("learnable_sink_init", 0.0))
    return decoder(c, blocks, norm, float32_head=True, fresh=(("*.sinks", sinks),))


# -- tests

for_tests(
    "hy_v4",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        **TINY_INDEXER,
        "first_k_dense_replace": ...,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "pad_token_id": 7,
        "swiglu_limit": 0.9,
        "hc_mult": 3,
        "hc_eps": 1e-2,
        "hc_magnitude": 1.7,
    },
    variants={
        "biases": {"attention_bias": True},
        "in groups": IN_GROUPS,
        "no key is left out": {"index_topk": 2048},
        "five layers": {"num_hidden_layers": 5, "indexer_types": ..., "mlp_layer_types": ...},
    },
    skip={
        **SKIP_LATENT,
        **SKIP_EXPERTS,
        "key:num_key_value_heads": "latent attention has a key head for each query head",
        "key:layer_types": "has one value",
        "field:IndexerSpec.norm_eps": "other scores choose the same keys: test_latent_attention.py",
        "key:learnable_sink_init": "concerns fresh weights alone",
    },
)
