"""DeepSeek-V2 and V2-Lite (2024, arXiv:2405.04434): multi-head latent attention; experts chosen from the best
groups, with softmax weights that are not renormalised, and a shared expert. The first layers have no experts.
"""

from liger_models.architectures.common import decoder, expert_layouts
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SHARED_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_LATENT,
    dense_then,
    latent_attention,
    routed_and_shared_experts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, MoESpec, NormSpec

# Settings of pretraining.
LOSS = dict.fromkeys(("aux_loss_alpha", "seq_aux"), "the reference adds no such loss")


@register(
    "deepseek_v2",
    reference="DeepseekV2ForCausalLM",
    defaults={"q_lora_rank": 1536, "topk_method": "greedy", "rope_interleave": True},
    layouts=expert_layouts(SHARED_EXPERTS),
    fixed={
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        "norm_topk_prob": False,  # not read by the reference
        "rope_interleave": True,
    },
    unread=LOSS,
)
def deepseek_v2(c: HFConfig) -> ModelSpec:
    norm, bias = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6)), c.take_flag("mlp_bias", False)
    mixer, mlps = latent_attention(c), dense_then(c, experts(c, bias), bias=bias)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


def experts(c: HFConfig, bias: bool) -> MoESpec:
    method = c.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{c.name}: topk_method must be 'greedy' or 'group_limited_greedy', found {method!r}"
        )
    for key in ("n_group", "topk_group"):  # without groups, which have no effect
        c.take(key, None)
    return routed_and_shared_experts(
        c,
        in_groups=method == "group_limited_greedy",
        bias=bias,
        renormalize=False,
        group_score="max",
        float32_router=True,
    )


# -- tests

for_tests(
    "deepseek_v2",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        "rope_interleave": ...,
        "norm_topk_prob": ...,
        "n_group": ...,
        "topk_group": ...,
        "topk_method": "greedy",
        "attention_bias": True,
        "mlp_bias": True,
    },
    variants={
        "no latent of queries": {"q_lora_rank": None},
        "in groups": {"topk_method": "group_limited_greedy", **IN_GROUPS},
    },
    skip={
        **SKIP_LATENT,
        "key:num_key_value_heads": "latent attention has a key head for each query head",
        "null:topk_method": "the reference then fails",
    },
)
