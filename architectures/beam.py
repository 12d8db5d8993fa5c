"""Beam 1.0 (Reflection, 2026): norms before and after the branches, residual sums that are scaled by depth,
gates of attention with biases, and the experts of DeepSeek-V3 without shared ones. Five layers of six have a
sliding window and positions; in the others queries grow with their position.
"""

from collections.abc import Mapping
from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, attention, decoder, mlp, rope, windows
from liger_models.architectures.common.deepseek import (
    IN_GROUPS,
    SKIP_EXPERTS,
    TINY_EXPERTS,
    corrected_experts,
    corrected_layouts,
    dense_or_sparse,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    ModelSpec,
    NormSpec,
    QKNormSpec,
    QueryScaleSpec,
)

GATE = (".self_attn.g_proj.", ".self_attn.gate_proj.")


@register(
    "beam",
    reference="BeamForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "sliding_window": 512,
        "moe_intermediate_size": 2560,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "final_logit_softcapping": 30.0,
    },
    layouts=tuple(replace(layout, rename=(GATE, *layout.rename)) for layout in corrected_layouts()),
)
def beam(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="float32")
    sparse = corrected_experts(c, keys=("num_experts",), shared=None)
    mlps = dense_or_sparse(c, mlp(c), sparse, 3)
    blocks = []
    for i, (mixer, inner) in enumerate(zip(mixers(c, norm), mlps, strict=True)):
        first, second = 2 * (i + 1), 2 * (i + 1) + 1  # numbers of the layer's sums, after the embedding
        block = BlockSpec(mixer, inner, norm, "sandwich", branch_scales=(first**-0.5, 1.0, second**-0.5))
        streams = (1 - 1 / first) ** 0.5, (1 - 1 / second) ** 0.5
        blocks.append(replace(block, stream_scales=streams))
    return decoder(c, blocks, norm, logit_softcap=c.take_number("final_logit_softcapping", None))


def mixers(c: HFConfig, norm: NormSpec) -> list[AttentionSpec]:
    """The attention of each layer; types of layers without rotary settings scale their queries instead."""
    last = c.take_count("num_hidden_layers") - 1
    limits = windows(c, lambda i: SLIDING if (i + 1) % 6 and i < last else FULL)
    types = [SLIDING if window else FULL for window in limits]
    plain = attention(c, bias=c.take_flag("attention_bias", False), positions=False)
    plain = replace(plain, qk_norm=QKNormSpec(norm), gates="channels", gate_bias=True)
    stated = c.take("rope_parameters", None) or {SLIDING: {"rope_type": "default"}, FULL: None}
    if not isinstance(stated, Mapping) or any(stated.get(kind, {}) == {} for kind in types):
        rope(c, plain.head_dim)  # whose error names what is wrong within
        raise ConfigError(f"{c.name}: rope_parameters must have an entry for each type of layers")
    growing = replace(plain, query_scale=QueryScaleSpec(0.1, 2048, first=1, power=True))
    ropes = {kind: stated[kind] and rope(c, plain.head_dim, layer_type=kind) for kind in set(types)}
    made = {kind: replace(plain, rope=turned) if turned else growing for kind, turned in ropes.items()}
    return [replace(made[kind], window=window) for kind, window in zip(types, limits, strict=True)]


# -- tests

for_tests(
    "beam",
    tiny={
        **{key: value for key, value in TINY_EXPERTS.items() if not key.endswith("_experts")},
        "first_k_dense_replace": ...,
        "num_experts": 8,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: None},
    },
    variants={
        "in groups": IN_GROUPS,
        "usual layers": {"layer_types": ..., "num_hidden_layers": 7, "mlp_layer_types": ...},
        "positions everywhere": {
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e5} for kind in (SLIDING, FULL)}
        },
        "no cap": {"final_logit_softcapping": None},
    },
    skip={
        "rope:all": "settings are stated by layer type",
        **{f"key:{key}": "the same" for key in ("rope_theta", "rope_scaling", "rope_local_base_freq")},
        **SKIP_EXPERTS,
        "swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts",
        **{
            f"field:QueryScaleSpec.{name}": "a constant, which matters at far positions: test_query_scale.py"
            for name in ("beta", "length", "first")
        },
    },
)
