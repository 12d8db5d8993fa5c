"""Hunyuan with experts (Tencent, 2025): Hunyuan with experts chosen by a float32 softmax, and a shared
expert; the number of experts per token may differ between layers.
"""

from typing import Any

from liger_models.architectures.common import activation, decoder
from liger_models.architectures.hunyuan import NORMS, SKIP, TINY, UNREAD, normed_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

NAMES = (*NORMS, (".router.", ".gate.wg."), (".shared_expert.", ".shared_mlp."))
PER_LAYER = ("num_shared_expert", "moe_intermediate_size")
NO_EFFECT = ("moe_drop_tokens", "moe_random_routing_dropped_token", "output_router_logits")


@register(
    "hunyuan_v1_moe",
    reference="HunYuanMoEV1ForCausalLM",
    layouts=(Layout(NAMES), Layout(NAMES, whole=("*.experts.*",))),
    defaults={"max_position_embeddings": 2048, "pad_token_id": 0, "num_experts": 1, "moe_topk": 1},
    fixed={"norm_topk_prob": True, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
    unread={**UNREAD, **dict.fromkeys(NO_EFFECT, "of no effect")},
)
def hunyuan_moe(c: HFConfig) -> ModelSpec:
    width = c.take_count("intermediate_size")
    for key, only in zip(PER_LAYER, (1, width), strict=True):
        if set(found := by_layer(c, c.take(key, only), key)) != {only}:
            raise ConfigError(f"{c.name}: {key} must be {only} in each layer, found {found}")
    norm, act = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), activation(c)
    attn, shared = normed_attention(c, norm), MLPSpec(width, act)
    experts = c.take_count("num_experts")
    chosen = by_layer(c, c.take_one_of("moe_topk", "num_experts_per_tok"), "moe_topk")
    if not all(type(count) is int and 1 <= count <= experts for count in chosen):
        raise ConfigError(f"{c.name}: moe_topk must be 1 to {experts}, the number of experts, found {chosen}")
    moes = [MoESpec(experts, k, width, act, float32_router=True, shared_expert=shared) for k in chosen]
    return decoder(c, [BlockSpec(attn, moe, norm) for moe in moes], norm)


def by_layer(c: HFConfig, value: Any, key: str) -> list[Any]:
    """One value per layer, from a list or from one common value.

    Raises:
        ConfigError: a list of the wrong length.
    """
    layers = c.take_count("num_hidden_layers")
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers:
        raise ConfigError(f"{c.name}: {key} must be one number, or one a layer, found {value}")
    return values


# -- tests

for_tests(
    "hunyuan_v1_moe",
    tiny={**TINY, "intermediate_size": 32, "num_experts": 4, "moe_topk": 3},
    variants={"by layer": {"moe_topk": [3, 2, 2]}},
    skip={
        **SKIP,
        "key:num_experts_per_tok": "another name of moe_topk",
        **{f"key:{key}": "has one value" for key in PER_LAYER},
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
