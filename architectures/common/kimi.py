"""Shared parts of Kimi Linear and Ling 3.0: linear attention with a decay for each channel next to latent
attention, and DeepSeek-V3's experts under other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from liger_models.architectures.common.deepseek import groups_and_chosen
from liger_models.architectures.common.linear_attention import LINEAR, check_convolution
from liger_models.architectures.common.mlps import activation, experts_and_chosen, mlp
from liger_models.architectures.common.model import FULL, layer_types
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    BlockSpec,
    ChannelDeltaSpec,
    LatentAttentionSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
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
