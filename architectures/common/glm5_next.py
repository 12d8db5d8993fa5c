"""The language model of GLM-5.3-Flash."""

from __future__ import annotations

from dataclasses import replace

from liger_models.architectures.common import kimi
from liger_models.architectures.common.deepseek import (
    corrected_experts,
    dense_or_sparse,
    latent_attention,
    older_choices,
)
from liger_models.architectures.common.linear_attention import LINEAR
from liger_models.architectures.common.mlps import aux_loss_coef, clamped_activation, mlp
from liger_models.architectures.common.model import FULL, decoder, layer_types
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    ChannelDeltaSpec,
    Constant,
    LatentAttentionSpec,
    ModelSpec,
    NormSpec,
    PooledIndexerSpec,
    StreamsSpec,
)

INDEXED = "indexed_attention"


def language_model(c: HFConfig) -> ModelSpec:
    """The language model, from its config."""
    c.fill(
        {
            **{"vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288},
            **{"num_hidden_layers": 45, "num_attention_heads": 64, "moe_intermediate_size": 2048},
            **{"n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256},
            **{"q_lora_rank": 1536, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "router_aux_loss_coef": 0.001, "pad_token_id": 154820},
        }
    )
    c.take_only(qk_rope_head_dim=0, head_dim=0, index_kpool_always_select_tail=True, hidden_act="silu")
    c.take("max_position_embeddings", None)  # no layer has positions
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    full = replace(latent_attention(c, positions=False), norm=norm)
    if c.take_count("qk_head_dim", full.qk_head_dim) != full.qk_head_dim:
        raise ConfigError(f"{c.name}: qk_head_dim must be {full.qk_head_dim}, or left out")
    linear, clamped = linear_attention(c, norm), clamped_activation(c)
    sparse = corrected_experts(c)
    assert sparse.shared_expert is not None
    shared = replace(sparse.shared_expert, activation=clamped)
    sparse = replace(sparse, activation=clamped, shared_expert=shared, aux_loss_coef=aux_loss_coef(c))
    mlps = dense_or_sparse(c, replace(mlp(c), activation=clamped), sparse, 3)
    streams = StreamsSpec(
        *(c.take_count("hc_mult", 4), c.take_count("hc_sinkhorn_iters", 20)),
        *(c.take_number("hc_eps", 1e-6), norm.eps),
        weighted_head=False,
    )
    layers = zip(mixers(c, linear, full), mlps, strict=True)
    blocks = [BlockSpec(*parts, norm, "hyper_connected", streams=streams) for parts in layers]
    rates = () if linear.lower_bound is None else (("*.A_log", Constant(0.0)),)
    model = decoder(c, blocks, norm, fresh=rates)
    c.finish()
    return model


def linear_attention(c: HFConfig, norm: NormSpec) -> ChannelDeltaSpec:
    """The linear attention. Keys of the older `linear_attn_config` take precedence over others.

    Raises:
        ConfigError: a bound of the decay that is not below zero.
    """
    heads, width = c.take_count("linear_num_heads", 64), c.take_count("linear_head_dim", 128)
    conv, bound = c.take_count("linear_conv_kernel_dim", 4), c.take("linear_lower_bound", None)
    bound = -5.0 if "linear_lower_bound" not in c.raw else bound
    if c.take("linear_attn_config", None):
        older = c.part("linear_attn_config")
        heads, width = older.take_count("num_heads", heads), older.take_count("head_dim", width)
        conv, bound = older.take_count("short_conv_kernel_size", conv), older.take("gate_lower_bound", bound)
        bound = -5.0 if older.take_flag("safe_gate", True) and bound is None else bound
    if bound is not None and not (isinstance(bound, int | float) and bound < 0):
        raise ConfigError(f"{c.name}: linear_lower_bound must be a number below 0 or null, found {bound!r}")
    ranks = {"forget_rank": width, "gate_rank": width}
    sizes = heads, width, conv
    return kimi.delta(c, sizes, "linear_conv_kernel_dim", norm, lower_bound=bound, **ranks)


def mixers(
    c: HFConfig, linear: ChannelDeltaSpec, full: LatentAttentionSpec
) -> list[ChannelDeltaSpec | LatentAttentionSpec]:
    """The mixer of each layer: linear attention, or attention to pools that an indexer chooses, its own or
    that of the layer before.

    Raises:
        ConfigError: a layer that shares pools without such a layer before it, or pools that do not divide
            the number of keys.
    """
    size, keys = c.take_count("index_kpool", 16), c.take_count("index_topk", 2048)
    if keys % size:
        raise ConfigError(f"{c.name}: index_topk must be a multiple of index_kpool, {size}, found {keys}")
    sizes = c.take_count("index_n_heads", 32), c.take_count("index_head_dim", 128)
    own = replace(full, indexer=PooledIndexerSpec(*sizes, size, keys // size))
    types = layer_types(c, lambda i: LINEAR if i % 4 != 3 else INDEXED, (LINEAR, INDEXED, FULL))
    choices = layer_types(c, older_choices(c), ("full", "shared"), "indexer_types")
    found: list[ChannelDeltaSpec | LatentAttentionSpec] = []
    for i, (kind, choice) in enumerate(zip(types, choices, strict=True)):
        if kind == LINEAR or choice == "full":
            found.append(linear if kind == LINEAR else own)
        elif i and found[-1] == own:
            found.append(replace(full, keys_of=i - 1))
        else:
            raise ConfigError(
                f"{c.name}: layer {i} shares the keys of the layer before it, which has no indexer; "
                "indexer_types must be full there"
            )
    return found
