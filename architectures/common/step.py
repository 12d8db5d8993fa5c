"""Step 3.5's language model, and its configs in the form in which they are released, with one list for all
layers and those for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.deepseek import dense_or_sparse
from liger_models.architectures.common.grouped_attention import attention, check_groups, layer_sizes, windows
from liger_models.architectures.common.mlps import experts_and_chosen
from liger_models.architectures.common.model import FULL, SLIDING, decoder
from liger_models.architectures.common.rotary import rope
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    Activation,
    BlockSpec,
    CappedSwiGLU,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    QKNormSpec,
)

_ONE_VALUE = {
    **dict.fromkeys(("gating", "use_head_wise_attn_gate", "use_qk_norm", "zero_centered", "use_moe"), True),
    **dict.fromkeys(("norm_expert_weight", "use_moe_router_bias"), True),
    **{"hidden_act": "silu", "moe_router_activation": "sigmoid", "att_impl_type": "GQA"},
}
_OF_LAYERS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
_OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}

_OLDER_ROPE = (
    *("rope_theta", "partial_rotary_factors", "partial_rotary_factor", "rope_scaling"),
    "rope_local_base_freq",
)
_DEFAULTS = {
    **{"num_key_value_heads": 8, "n_routed_experts": 288, "num_experts_per_tok": 8},
    "share_expert_dim": 1280,
}


def language_model(c: HFConfig) -> ModelSpec:
    """The language model, from its config."""
    c = _as_saved(c)
    c.take_only(**_ONE_VALUE)
    for key in ("mtp_layer_types", "mtp_mlp_layer_types"):
        c.take(key, None)  # of layers that do not run
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5), offset=1.0, cast="gemma")
    full = attention(c, bias=c.take_flag("attention_bias", False), layer_type=FULL, partial=1.0)
    scale = c.take_number("query_pre_attn_scalar", full.head_dim, positive=True) ** -0.5
    full = replace(full, scale=scale, qk_norm=QKNormSpec(norm), gates="heads")
    local = rope(c, full.head_dim, layer_type=SLIDING, partial=1.0)
    of_sliding = c.take_count("num_sliding_attention_heads", full.num_attention_heads)
    own = layer_sizes(c, ("num_attention_heads",))
    routed, always = _limits(c, "swiglu_limits"), _limits(c, "swiglu_limits_shared")
    blocks = []
    for i, window in enumerate(windows(c, lambda i: FULL)):
        heads = full.num_attention_heads if window is None else of_sliding
        heads = heads if own is None else own[i].get("num_attention_heads", full.num_attention_heads)
        check_groups(c, heads, full.num_key_value_heads)
        mixer = replace(full, num_attention_heads=heads, window=window, rope=local if window else full.rope)
        inner = dense_or_sparse(c, *_mlps(c, routed[i], always[i]), 3)[i]
        blocks.append(BlockSpec(mixer, inner, norm))
    model = decoder(c, blocks, norm)
    c.finish()
    return model


def _mlps(c: HFConfig, routed: float, always: float) -> tuple[MLPSpec, MoESpec]:
    """The MLP of a dense layer, and the experts of another, with these limits."""
    always_act: Activation | CappedSwiGLU = CappedSwiGLU(always) if always else "silu"
    bias = c.take_flag("mlp_bias", False)
    experts = MoESpec(
        *experts_and_chosen(c, ("n_routed_experts",)),
        c.take_count("moe_intermediate_size"),
        CappedSwiGLU(routed) if routed else "silu",
        score="sigmoid",
        correction_bias=True,
        routed_scaling_factor=c.take_number("moe_router_scaling_factor", 1.0),
        float32_router=c.take_flag("need_fp32_gate", False),
        shared_expert=MLPSpec(c.take_count("share_expert_dim"), always_act, bias),
    )
    return MLPSpec(c.take_count("intermediate_size"), always_act, bias), experts


def _limits(c: HFConfig, key: str) -> list[float]:
    """The limit of each layer; 0 for none."""
    count = c.take_count("num_hidden_layers")
    found = c.take(key, None) or [0.0] * count
    if not isinstance(found, list) or not all(x is None or (is_finite(x) and x >= 0) for x in found):
        raise ConfigError(f"{c.name}: {key} must be a list of limits, or nulls, found {abbreviate(found)}")
    return [float(x or 0) for x in found]


def _as_saved(c: HFConfig) -> HFConfig:
    """The config of a language model with names, lists and rotary settings as transformers saves them.

    Raises:
        ConfigError: lists of another length, or settings of sliding layers that the reference would not read.
    """
    raw = {_OTHER_NAMES.get(key, key): value for key, value in c.raw.items()}
    if len(raw) < len(c.raw):
        raise ConfigError(f"{c.name}: a setting has two names; keep one of {abbreviate(_OTHER_NAMES)}")
    raw = {**_DEFAULTS, **raw}
    layers, more = raw["num_hidden_layers"], raw.get("num_nextn_predict_layers") or 0
    for key in _OF_LAYERS:
        value = raw.get(key)
        if isinstance(value, list) and len(value) not in (layers, layers + more):
            raise ConfigError(
                f"{c.name}: {key} must have {layers} entries, one per layer, found {len(value)}"
            )
        raw[key] = value[:layers] if isinstance(value, list) else value
    chosen = raw.pop("moe_layers_enum", None)
    if raw["mlp_layer_types"] is None and chosen is not None:
        numbers = chosen.split(",") if isinstance(chosen, str) else chosen
        sparse = {int(number) for number in numbers if str(number).strip()}
        raw["mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in range(layers)]
    other = raw.pop("attention_other_setting", None)
    if raw.get("num_sliding_attention_heads") is None and other:
        raw["num_sliding_attention_heads"] = _heads_of_sliding_layers(c, raw, other)
    raw["rope_parameters"] = _rope_by_type(c, raw)
    for key in _OLDER_ROPE:
        raw.pop(key, None)
    made = c.with_raw(raw)
    made.most_layers = c.most_layers
    made.take("is_causal", None)
    return made


def _heads_of_sliding_layers(c: HFConfig, raw: Mapping[str, Any], other: Any) -> Any:
    known = {
        "attention_type": SLIDING,
        "num_attention_groups": raw.get("num_key_value_heads"),
        "head_dim": raw.get("head_dim"),
        "true_head_dim": raw.get("head_dim"),
    }
    rest = (
        {key: x for key, x in other.items() if key != "num_attention_heads"}
        if isinstance(other, dict)
        else {}
    )
    if not isinstance(other, dict) or any(key not in known or known[key] != x for key, x in rest.items()):
        raise ConfigError(
            f"{c.name}: attention_other_setting may give sliding layers another num_attention_heads, and "
            f"nothing else; found {abbreviate(other)}"
        )
    return other.get("num_attention_heads")


def _rope_by_type(c: HFConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of each type of layer, from those of the first layer of that type."""
    types = raw["layer_types"] or [FULL] * raw["num_hidden_layers"]
    stated = raw.get("rope_parameters") or {}
    if all(isinstance(stated.get(kind), Mapping) for kind in types):
        return {kind: stated[kind] for kind in dict.fromkeys(types)}
    if stated:
        raise ConfigError(f"{c.name}: rope_parameters must hold settings of each of {sorted(set(types))}")
    made, shares = {}, raw["partial_rotary_factors"]
    thetas = 10000.0 if raw.get("rope_theta") is None else raw["rope_theta"]
    for kind in dict.fromkeys(types):
        first = types.index(kind)
        theta = thetas[first] if isinstance(thetas, list) else thetas
        made[kind] = {"rope_type": "default", "rope_theta": theta}
        if shares:
            made[kind]["partial_rotary_factor"] = shares[first]
    if raw.get("rope_local_base_freq") is not None and SLIDING in made:  # transformers 4's spelling
        made[SLIDING]["rope_theta"] = raw["rope_local_base_freq"]
    if FULL in made:
        if raw.get("partial_rotary_factor") is not None:
            made[FULL]["partial_rotary_factor"] = raw["partial_rotary_factor"]
        made[FULL] |= raw.get("rope_scaling") or {}
    return made
