"""A.X K1 (SK Telecom, 2026): the latent attention and the experts of DeepSeek-V3, with a norm of the experts'
output. The released checkpoint has no correction bias of its routers.
"""

from dataclasses import replace

from liger_models.architectures.common import decoder, expert_layouts, mlp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    LATENT_VARIANTS,
    SHARED_EXPERTS,
    SKIP_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_LATENT,
    dense_or_sparse,
    further_predictions,
    latent_attention,
    routed_and_shared_experts,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

NAMES = (".router.correction_bias", ".gate.e_score_correction_bias"), SHARED_EXPERTS
ON_DISK = expert_layouts(*NAMES, (".mlp.output_norm.", ".post_mlp_layernorm."))[0]


def layers(c: HFConfig, norm: NormSpec) -> list[MLPSpec | MoESpec]:
    """The MLP or the experts of each layer."""
    c.take_only(scoring_func="sigmoid", moe_layer_freq=1)
    experts = routed_and_shared_experts(
        c,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", False),
        correction_bias=True,
        float32_router=True,
        output_norm=norm,
    )
    return dense_or_sparse(c, mlp(c), experts, c.take_count("first_k_dense_replace", 1, least=0))


def unused(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the norms of the released checkpoint in layers without experts, and of further layers."""
    mlps = layers(c, NormSpec())
    dense = (i for i, inner in enumerate(mlps) if isinstance(inner, MLPSpec))
    return *(f"model.layers.{i}.post_mlp_layernorm.*" for i in dense), *further_predictions(c)


@register(
    "axk1",
    reference="AXK1ForCausalLM",
    defaults={
        "rope_interleave": True,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    layouts=(
        ON_DISK,
        replace(ON_DISK, absent=("*.correction_bias",)),
        expert_layouts(*NAMES, (".output_norm.", ".post_mlp_layernorm."))[1],
    ),
    carried=unused,
    unread={"topk_method": "the reference has one method; without a correction bias it adds zeros"},
)
def axk1(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    mixer = latent_attention(c)
    return decoder(c, [BlockSpec(mixer, inner, norm) for inner in layers(c, norm)], norm)


# -- tests

for_tests(
    "axk1",
    tiny={**TINY_LATENT, **TINY_EXPERTS, **IN_GROUPS, "first_k_dense_replace": 2},
    variants={
        **{name: change for name, change in LATENT_VARIANTS.items() if name != "no latent of queries"},
        "one group, not renormalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "experts by a list": {
            "first_k_dense_replace": ...,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    },
    skip={**SKIP_LATENT, **SKIP_EXPERTS},
)
