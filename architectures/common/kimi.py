"""Shared parts of Kimi Linear, Ling 3.0 and GLM-5.3-Flash: linear attention with a decay for each channel
next to latent attention, and DeepSeek-V3's experts under other keys; and the language model of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.deepseek import (
    corrected_experts,
    dense_or_sparse,
    groups_and_chosen,
    latent_attention,
    older_choices,
)
from liger_models.architectures.common.linear_attention import LINEAR, check_convolution
from liger_models.architectures.common.mlps import (
    activation,
    aux_loss_coef,
    clamped_activation,
    experts_and_chosen,
    mlp,
)
from liger_models.architectures.common.model import FULL, decoder, layer_types
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    ChannelDeltaSpec,
    Constant,
    GatedPoolsSpec,
    LatentAttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    StreamsSpec,
)

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
MIXER = ((".linear_attn.", ".self_attn."), (".forget_gate.", "."))


def experts(c: HFConfig) -> MoESpec:
    """Experts chosen by sigmoid scores and a correction bias, with a shared one."""
    count, chosen = experts_and_chosen(
        c, ("num_experts", "num_local_experts"), ("num_experts_per_token", "num_experts_per_tok")
    )
    groups = groups_and_chosen(c, count, chosen, smallest=2, keys=("num_expert_group", "n_group"))
    renormalize = c.take_one_of("moe_renormalize", "norm_topk_prob", default=False)
    if not isinstance(renormalize, bool):
        raise ConfigError(f"{c.name}: moe_renormalize must be true or false, found {renormalize!r}")
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    return MoESpec(
        count,
        chosen,
        inner,
        act,
        score="sigmoid",
        renormalize=renormalize,
        correction_bias=True,
        num_groups=groups[0],
        top_groups=groups[1],
        routed_scaling_factor=c.take_number("routed_scaling_factor"),
        float32_router=True,
        shared_expert=MLPSpec(c.take_count(("num_shared_experts", "n_shared_experts")) * inner, act),
    )


def delta(
    c: HFConfig, sizes: tuple[int, int, int], key: str, norm: NormSpec, **settings: Any
) -> ChannelDeltaSpec:
    """Linear attention with these `sizes`: number of heads, their width, and that of the convolution, which
    `key` gives. `settings` are other fields of the spec.
    """
    check_convolution(c, sizes[2], key)
    return ChannelDeltaSpec(*sizes, norm_eps=norm.eps, **settings)


def blocks(
    c: HFConfig,
    linear: ChannelDeltaSpec,
    full: LatentAttentionSpec,
    norm: NormSpec,
    *,
    default: Callable[[int], str],
    first_dense: int,
) -> list[BlockSpec]:
    """Layers by `layer_types` and `mlp_layer_types`.

    Args:
        default: type of a layer, where the config has none.
        first_dense: default number of the first layers without experts.
    """
    first = c.take_count("first_k_dense_replace", first_dense, least=0)
    types = layer_types(c, default, (LINEAR, FULL))
    inner = layer_types(
        c, lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types"
    )
    dense, sparse = mlp(c), experts(c)
    return [
        BlockSpec(linear if kind == LINEAR else full, dense if part == "dense" else sparse, norm)
        for kind, part in zip(types, inner, strict=True)
    ]


def kimi_delta(c: HFConfig, norm: NormSpec) -> tuple[ChannelDeltaSpec, Callable[[int], str]]:
    """Kimi Linear's linear attention, and the type of each layer where the config has no `layer_types`. Keys
    of the older `linear_attn_config` take precedence over others.
    """

    def default(i: int) -> str:
        return FULL if i and i % 4 == 0 else LINEAR

    kind: Callable[[int], str] = default
    heads, width = c.take_count("linear_num_heads", 32), c.take_count("linear_head_dim", 128)
    conv = c.take_count("linear_conv_kernel_dim", 4)
    if c.take("linear_attn_config", None):
        older = c.part("linear_attn_config")
        heads, width = older.take_count("num_heads", heads), older.take_count("head_dim", width)
        conv = older.take_count("short_conv_kernel_size", conv)
        lists = {FULL: older.take("full_attn_layers", None), LINEAR: older.take("kda_layers", None)}
        kind = default if None in lists.values() else by_lists(c, lists)
    sizes = heads, width, conv
    return delta(c, sizes, "linear_conv_kernel_dim", norm, forget_rank=width, gate_rank=width), kind


def positions(c: HFConfig, length: int) -> HFConfig:
    """The config as `rope` reads it: `rope_parameters` take precedence over `rope_theta`, and the longest
    position, by default `length`, has two names.
    """
    raw = dict(c.raw)
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        c.take(key, None)
    if raw.get("rope_parameters") is not None:
        raw.pop("rope_theta", None)
    c.take_one_of("max_position_embeddings", "model_max_length", default=None)  # names of one setting
    stated = c.take_count("model_max_length", length)
    raw["max_position_embeddings"] = c.take_count("max_position_embeddings", stated)
    return c.with_raw(raw)


def by_lists(c: HFConfig, lists: Mapping[str, Sequence[int] | None]) -> Callable[[int], str]:
    """Type of each layer, from the numbers of the layers of each type, starting at 1.

    Raises:
        ConfigError: they do not name each layer once.
    """
    count = c.take_count("num_hidden_layers")
    named = {number - 1: kind for kind, numbers in lists.items() for number in numbers or ()}
    if sum(len(numbers or ()) for numbers in lists.values()) != count or named.keys() != set(range(count)):
        raise ConfigError(
            f"{c.name}: full_attn_layers and kda_layers must name each of the {count} layers once, starting "
            f"at 1, found {dict(lists)}"
        )
    return named.__getitem__


INDEXED = "indexed_attention"


def language_model(c: HFConfig) -> ModelSpec:
    """The language model of GLM-5.3-Flash, from its config."""
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
    linear, clamped = bounded_delta(c, norm), clamped_activation(c)
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
    layers = zip(pooling_mixers(c, linear, full), mlps, strict=True)
    blocks = [BlockSpec(*parts, norm, "hyper_connected", streams=streams) for parts in layers]
    rates = () if linear.lower_bound is None else (("*.A_log", Constant(0.0)),)
    model = decoder(c, blocks, norm, fresh=rates)
    c.finish()
    return model


def bounded_delta(c: HFConfig, norm: NormSpec) -> ChannelDeltaSpec:
    """The linear attention of GLM-5.3-Flash. Keys of the older `linear_attn_config` take precedence over
    others.

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
    return delta(c, sizes, "linear_conv_kernel_dim", norm, lower_bound=bound, **ranks)


def pooling_mixers(
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
    own = replace(full, indexer=GatedPoolsSpec(*sizes, size, keys // size))
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


DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_renormalize": True,
}
TINY: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": ...,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 0.05,  # small outputs of heads, whose norm has a small epsilon and jumps at zero
    "layer_types": [FULL, LINEAR, FULL],  # two linear layers in training amplify rounding
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "pad_token_id": 7,
}
OTHER_NAMES = {
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
SKIP = {
    **{f"key:{key}": f"another name of {name}" for key, name in OTHER_NAMES.items()},
    "key:hidden_act": "the convolutions of linear attention have only SiLU",
    "variant:hidden_act": "the convolutions of linear attention have only SiLU",
    "variant:one_kv_head": "latent attention has a key head for each query head",
}
