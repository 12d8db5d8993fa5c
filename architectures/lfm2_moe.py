"""LFM2 MoE (Liquid AI, 2025, arXiv:2511.23404): LFM2 with experts chosen by sigmoid scores and a bias in all
but the first layers.
"""

from liger_models.architectures.common import decoder, experts_and_chosen, liquid
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

NAMES = (*liquid.NAMES, *liquid.EXPERTS, *liquid.PRE_NORM, *liquid.ATTENTION)


@register(
    "lfm2_moe",
    reference="Lfm2MoeForCausalLM",
    layouts=(Layout(NAMES), Layout(NAMES, ("*.experts.*",))),
    defaults={
        **liquid.DEFAULTS,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
)
def lfm2_moe(c: HFConfig) -> ModelSpec:
    norm, dense = NormSpec(eps=c.take_number("norm_eps", 1e-5)), MLPSpec(c.take_count("intermediate_size"))
    moe = MoESpec(
        *experts_and_chosen(c, ("num_experts",)),
        intermediate_size=c.take_count("moe_intermediate_size"),
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", True),
        renormalize_eps=1e-6,
        correction_bias=c.take_flag("use_expert_bias", True),
        routed_scaling_factor=c.take_number("routed_scaling_factor", 1.0),
    )
    c.take("layer_types")
    first = c.take_count("num_dense_layers", 2, least=0)
    blocks = [
        BlockSpec(mixer, dense if i < first else moe, norm)
        for i, mixer in enumerate(liquid.mixers(c, norm, ()))
    ]
    return liquid.tied(c, decoder(c, blocks, norm))


# -- tests

for_tests(
    "lfm2_moe",
    tiny={
        **liquid.TINY,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
    },
    variants={"older name": {"tie_embedding": True}},
)
