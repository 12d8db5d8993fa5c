"""DeepSeek-V2 and V2-Lite (2024, arXiv:2405.04434): latent attention, experts weighed by their shares of all,
chosen from the groups with the best ones, and one that all tokens share. The first layers have no experts.
"""

from liger_models.architectures.common import (
    activation,
    decoder,
    dense_then,
    expert_layouts,
    experts_and_chosen,
    groups_and_chosen,
    latent_attention,
    take_only,
)
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

ONE_VALUE = {
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "norm_topk_prob": False,  # the reference does not read it
    "rope_interleave": True,
}
LOSS = ("aux_loss_alpha", "seq_aux")  # of the first training: the reference adds no such loss


@register(
    "deepseek_v2",
    reference="DeepseekV2ForCausalLM",
    tiny={
        "num_key_value_heads": 4,
        "head_dim": ...,
        "moe_intermediate_size": 24,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 5,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-3,
    },
    defaults={"q_lora_rank": 1536, "topk_method": "greedy", "rope_interleave": True},
    layouts=expert_layouts((".shared_expert.", ".shared_experts.")),
    variants={
        "no latent of queries": {"q_lora_rank": None},
        "in groups": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
        },
    },
    skip={
        "variant:one_kv_head": "latent attention has a key head for each query head",
        "key:num_key_value_heads": "the same",
        "key:head_dim": "follows from the sizes of its parts, and is checked",
        "key:qk_head_dim": "the same",
        "null:topk_method": "the reference then fails",
        **{f"key:{key}": "has one value" for key in ONE_VALUE},
        **{f"key:{key}": "the reference does not read it" for key in LOSS},
    },
)
def deepseek_v2(c: HFConfig) -> ModelSpec:
    take_only(c, **ONE_VALUE)
    for key in LOSS:
        c.take(key, None)
    norm, bias = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6)), c.take_flag("mlp_bias", False)
    mixer, mlps = latent_attention(c), dense_then(c, experts(c, bias), bias=bias)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in mlps], norm)


def experts(c: HFConfig, bias: bool) -> MoESpec:
    count, top_k = experts_and_chosen(c, ("n_routed_experts",))
    method, groups = c.take("topk_method", "greedy"), (1, 1)
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{c.name}: topk_method must be 'greedy' or 'group_limited_greedy', found {method!r}"
        )
    if method == "group_limited_greedy":
        groups = groups_and_chosen(c, count, top_k)
    for key in ("n_group", "topk_group"):  # without groups of no effect
        c.take(key, None)
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    return MoESpec(
        count,
        top_k,
        inner,
        act,
        renormalize=False,
        num_groups=groups[0],
        top_groups=groups[1],
        group_score="max",
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.0),
        float32_router=True,
        shared_expert=MLPSpec(c.take_count("n_shared_experts") * inner, act, bias),
    )
