"""GLM-4.7-Flash (Z.ai, 2026): the latent attention and the experts of DeepSeek-V3, of another size. A list
says which layers have experts.
"""

from liger_models.architectures.common import (
    corrected_experts,
    corrected_layouts,
    decoder,
    further_predictions,
    latent_attention,
    layer_types,
    mlp,
)
from liger_models.architectures.registry import register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import BlockSpec, ModelSpec, NormSpec


@register(
    "glm4_moe_lite",
    reference="Glm4MoeLiteForCausalLM",
    tiny={
        "num_key_value_heads": 4,
        "rope_interleave": True,
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
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-3,
        "num_nextn_predict_layers": 1,
    },
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
    variants={
        "in groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        "no latent of queries": {"q_lora_rank": None},
        "biases": {"attention_bias": True},
        "rotated by halves": {"rope_interleave": False},
    },
    skip={
        "variant:one_kv_head": "latent attention has a key head for each query head",
        "key:head_dim": "follows from the sizes of its parts, and is checked",
        "key:qk_head_dim": "the same",
        "key:first_k_dense_replace": "follows from mlp_layer_types, and is checked",
        **{f"key:{key}": "has one value" for key in ("scoring_func", "topk_method", "moe_layer_freq")},
    },
)
def glm4_moe_lite(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    types = layer_types(c, lambda i: "sparse" if i else "dense", ("dense", "sparse"), "mlp_layer_types")
    first = c.take("first_k_dense_replace", None)
    if first is not None and types != ["dense" if i < first else "sparse" for i in range(len(types))]:
        raise ConfigError(
            f"{c.name}: first_k_dense_replace is {first!r}, and mlp_layer_types, which counts, says {types}; "
            "let them agree, or remove the first"
        )
    mixer, dense, sparse = latent_attention(c), mlp(c), corrected_experts(c)
    blocks = [BlockSpec(mixer, dense if kind == "dense" else sparse, norm) for kind in types]
    return decoder(c, blocks, norm)
