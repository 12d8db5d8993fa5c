"""LongCat-Flash (Meituan, 2025, arXiv:2509.01322): two latent attentions and two MLPs per layer, and experts
on a shortcut around the second pair; some experts return their input.
"""

import math
from dataclasses import replace

from liger_models.architectures.common import activation, decoder, experts_and_chosen
from liger_models.architectures.common.deepseek import SKIP_LATENT, TINY_LATENT, latent_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

NAMES = (
    (".mlp.", ".mlps."),
    (".moe.0.router.weight", ".mlp.router.classifier.weight"),
    (".moe.0.router.correction_bias", ".mlp.router.e_score_correction_bias"),
    (".moe.0.", ".mlp."),
)


def unused_experts(c: HFConfig) -> tuple[str, ...]:
    """Matrices that transformers stores for experts that return their input, and the modules for multi-token
    prediction.
    """
    first, count = c.take_count("n_routed_experts"), c.take_count("zero_expert_num", 0, least=0)
    unused = (f"model.layers.*.mlp.experts.{first + e}.*_proj.weight" for e in range(count))
    return (*unused, "model.mtp.*")


@register(
    "longcat_flash",
    reference="LongcatFlashForCausalLM",
    defaults={
        "num_layers": 28,
        "num_attention_heads": 64,
        "ffn_hidden_size": 12288,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_topk": 12,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "expert_ffn_hidden_size": 2048,
        "max_position_embeddings": 131072,
    },
    layouts=(Layout(NAMES, in_one=2), Layout(NAMES, ("*.experts.*",), in_one=2)),
    carried=unused_experts,
    fixed={
        **{"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        **{"router_bias": False, "zero_expert_type": "identity", "norm_topk_prob": False},
    },
    unread={"num_hidden_layers": "the reference counts both attentions of each of num_layers layers"},
)
def longcat_flash(c: HFConfig) -> ModelSpec:
    norm, hidden = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), c.take_count("hidden_size")
    mixer = latent_attention(c, interleaved=True, theta=1e7)
    of_queries, of_keys = (math.sqrt(hidden / c.take_count(f"{x}_lora_rank")) for x in ("q", "kv"))
    mixer = replace(mixer, scale=mixer.scale * of_queries, latent_scale=of_keys)
    first = BlockSpec(mixer, MLPSpec(c.take_count("ffn_hidden_size"), activation(c)), norm, "shortcut")
    layers = [replace(first, experts=experts(c)), first] * c.take_count("num_layers")
    return decoder(c, layers, norm)


def experts(c: HFConfig) -> MoESpec:
    """Experts of which some return their input, chosen by corrected probabilities."""
    return MoESpec(
        *experts_and_chosen(c, ("n_routed_experts",), ("moe_topk",)),
        c.take_count("expert_ffn_hidden_size"),
        activation(c),
        renormalize=False,
        correction_bias=True,
        float32_router=True,
        routed_scaling_factor=c.take_number("routed_scaling_factor", 6.0),
        identity_experts=c.take_count("zero_expert_num", 0, least=0),
    )


# -- tests

for_tests(
    "longcat_flash",
    tiny={
        **TINY_LATENT,
        "qk_rope_head_dim": 64,  # the class's own head_dim
        "rope_interleave": ...,
        "intermediate_size": ...,
        "num_hidden_layers": ...,
        "num_layers": 2,
        "ffn_hidden_size": 80,
        "moe_topk": 4,
        "n_routed_experts": 6,
        "zero_expert_num": 0,
        "expert_ffn_hidden_size": 24,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-3,
    },
    variants={"biases": {"attention_bias": True}, "narrow rotation": {"qk_rope_head_dim": 6, "head_dim": 6}},
    skip={**SKIP_LATENT, "key:num_key_value_heads": "as num_attention_heads, or left out"},
)
