"""Trinity (Arcee AI, 2025): norms before and after the branches, QK-norm per head, gated attention, and
the experts of DeepSeek-V3. Three of every four layers have a sliding window; only those have positions.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    decoder,
    experts_and_chosen,
    mlp,
    windows,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, Constant, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

NAMES = (
    *((".pre_feedforward_layernorm.", ".pre_mlp_layernorm."), (".g_proj.", ".gate_proj.")),
    *((".post_feedforward_layernorm.", ".post_mlp_layernorm."), (".shared_expert.", ".shared_experts.")),
    *((".router.correction_bias", ".expert_bias"), (".router.", ".router.gate.")),
)
ONE = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")


@register(
    "afmoe",
    reference="AfmoeForCausalLM",
    layouts=(Layout(NAMES), Layout(NAMES, ("*.experts.*",))),
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "sliding_window": 1024,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
    },
    # Of the released configs; the reference reads none of them.
    fixed={"score_func": "sigmoid", "route_norm": True, **dict.fromkeys(ONE, 1)},
    unread={"load_balance_coeff": "a step of the correction bias", "use_grouped_mm": "the same function"},
)
def afmoe(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5), cast="float32")
    attn = attention(c, bias=c.take_flag("attention_bias", False))
    attn = replace(attn, qk_norm=QKNormSpec(norm), gates="channels")
    dense, sparse, first = mlp(c), experts(c), c.take_count("num_dense_layers", 1, least=0)
    every = c.take_count("global_attn_every_n_layers", 4)
    spans = windows(c, lambda i: SLIDING if (i + 1) % every else FULL)
    blocks = [
        BlockSpec(
            replace(attn, window=window, rope=attn.rope if window else None),
            dense if i < first else sparse,
            norm,
            topology="sandwich",
        )
        for i, window in enumerate(spans)
    ]
    scale = c.take_count("hidden_size") ** 0.5 if c.take_flag("mup_enabled", False) else 1.0
    fresh = (("*.mlp.router.weight", Constant(0.0)),)
    return decoder(c, blocks, norm, input_scale=scale, fresh=fresh)


def experts(c: HFConfig) -> MoESpec:
    """Routed experts, and the shared ones as one MLP."""
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    return MoESpec(
        *experts_and_chosen(c),
        inner,
        act,
        score="sigmoid",
        correction_bias=True,
        routed_scaling_factor=c.take_number("route_scale", 1.0),
        shared_expert=MLPSpec(c.take_count("num_shared_experts") * inner, act),
    )


# -- tests

for_tests(
    "afmoe",
    tiny={
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "mup_enabled": True,
        "sliding_window": 7,
        "global_attn_every_n_layers": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 3,
        "route_scale": 1.7,
    },
    variants={"layer_types": {"layer_types": [FULL, SLIDING, SLIDING], "num_dense_layers": 0}},
    skip={
        "key:num_local_experts": "another name of num_experts",
        "null:route_scale": "the reference would multiply by it",
        "swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts",
    },
)
