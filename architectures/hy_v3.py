"""Hunyuan 3 (Tencent, 2026): grouped-query attention with QK-norm per head, and experts chosen by sigmoid
scores and a correction bias, next to shared ones. The first layer has no experts.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    activation,
    attention,
    decoder,
    experts_and_chosen,
    mlp,
)
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

NAMES = (
    (".router.correction_bias", ".expert_bias"),
    (".router.", ".router.gate."),
    (".shared_expert.", ".shared_mlp."),
)
IN_MEMORY = (
    (".router.correction_bias", ".e_score_correction_bias"),
    (".router.", ".gate."),
    SHARED_EXPERTS,
)


@register(
    "hy_v3",
    reference="HYV3ForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "initializer_range": 0.006,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
    },
    layouts=(Layout(NAMES), Layout(IN_MEMORY, ("*.experts.*",))),
    carried=lambda c: (f"model.layers.{c.take_count('num_hidden_layers')}.*",),
    unread={"enable_moe_fp32_combine": "the sum of experts is accumulated in float32"},
)
def hy_v3(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    attn = attention(c, bias=c.take_flag("attention_bias", False), theta=11158840.0)
    attn = replace(attn, qk_norm=QKNormSpec(norm))
    mlps = dense_or_sparse(c, mlp(c, bias=c.take_flag("mlp_bias", False)), experts(c), 1)
    blocks = [BlockSpec(attn, inner, norm) for inner in mlps]
    return decoder(c, blocks, norm)


def experts(c: HFConfig) -> MoESpec:
    """Routed experts, and the shared ones as one MLP."""
    inner, act = c.take_count("moe_intermediate_size"), activation(c)
    shared = c.take_count("num_shared_experts") * inner
    return MoESpec(
        *experts_and_chosen(c),
        inner,
        act,
        score="sigmoid",
        correction_bias=True,
        float32_router=True,
        routed_scaling_factor=c.take_number("router_scaling_factor", 2.826),
        shared_expert=MLPSpec(shared, act, c.take_flag("mlp_bias", False)),
    )


# -- tests

for_tests(
    "hy_v3",
    tiny={
        "attention_bias": True,
        "mlp_bias": True,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.7,
    },
    variants={"mlp_layer_types": {"mlp_layer_types": ["sparse", "dense", "sparse"]}},
    skip={"key:num_local_experts": "another name of num_experts"},
)
