"""GLM-4.7-Flash (Z.ai, 2026): the latent attention and the experts of DeepSeek-V3 in other sizes. A list says
which layers have experts.
"""

from liger_models.architectures.common import decoder, layer_types, mlp, mtp
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    LATENT_VARIANTS,
    SKIP_EXPERTS,
    SKIP_LATENT,
    TINY_EXPERTS,
    TINY_LATENT,
    corrected_experts,
    corrected_layouts,
    further_predictions,
    latent_attention,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec


@register(
    "glm4_moe_lite",
    reference="Glm4MoeLiteForCausalLM",
    defaults={
        "rope_interleave": True,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    layouts=corrected_layouts(),
    carried=further_predictions,
    mtp=mtp.DEEPSEEK,
)
def glm4_moe_lite(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    types = layer_types(c, lambda i: "sparse" if i else "dense", ("dense", "sparse"), "mlp_layer_types")
    first = c.take("first_k_dense_replace", None)
    if first is not None and types != ["dense" if i < first else "sparse" for i in range(len(types))]:
        raise ConfigError(
            f"{c.name}: first_k_dense_replace is {first!r}, and mlp_layer_types, which counts, says "
            f"{types}; make them agree, or remove the first"
        )
    mixer, dense, sparse = latent_attention(c), mlp(c), corrected_experts(c)
    blocks = [BlockSpec(mixer, dense if kind == "dense" else sparse, norm) for kind in types]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "glm4_moe_lite",
    tiny={
        **TINY_LATENT,
        **TINY_EXPERTS,
        "first_k_dense_replace": ...,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_nextn_predict_layers": 1,
    },
    variants={"in groups": IN_GROUPS, **LATENT_VARIANTS},
    skip={
        **SKIP_LATENT,
        **SKIP_EXPERTS,
        "key:first_k_dense_replace": "follows from mlp_layer_types, and is checked",
    },
)
