"""Kolibri 1 (Aleph Alpha, 2026): experts chosen by corrected logits and a shared one, QK-norm per head, norms
before and after each branch, and a sliding window on four layers of five; only those have positions.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING, attention, decoder, windows
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.common.mlps import activation, experts_and_chosen
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec


def layout(bias: str, after_attention: str, after_mlp: str, *whole: str) -> Layout:
    """The layout with these names of the correction bias and of the norms after branches."""
    norms = (
        (".post_attention_layernorm.", after_attention),
        (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
        (".post_feedforward_layernorm.", after_mlp),
    )
    router = SHARED_EXPERTS, (".router.", ".gate."), (".mlp.gate.correction_bias", bias)
    return Layout((*norms, *router), whole)


@register(
    "kolibri1",
    reference="Kolibri1ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 384,
        "num_experts_per_tok": 6,
    },
    layouts=(
        layout(".moe.router.expert_bias", ".post_attn_norm.", ".post_ffn_norm."),
        layout(
            *(".mlp.gate.e_score_correction_bias", ".post_self_attn_layernorm.", ".post_mlp_layernorm."),
            "*.experts.*",
        ),
    ),
)
def kolibri1(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = replace(attention(c), qk_norm=QKNormSpec(norm))
    act = activation(c)
    experts = MoESpec(
        *experts_and_chosen(c),
        *(c.take_count("moe_intermediate_size"), act),
        shared_expert=MLPSpec(c.take_count("shared_expert_intermediate_size"), act),
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", False),
        correction_bias=True,
        correct_logits=True,
        float32_router=True,
    )
    limits = windows(c, lambda i: SLIDING if (i + 1) % 5 else FULL)
    mixers = [replace(attn, window=window, rope=attn.rope if window else None) for window in limits]
    blocks = [BlockSpec(mixer, experts, norm, topology="sandwich") for mixer in mixers]
    return decoder(c, blocks, norm)


# -- tests

for_tests(
    "kolibri1",
    tiny={
        "intermediate_size": ...,
        "rms_norm_eps": 1e-3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    variants={"usual layers": {"layer_types": ..., "num_hidden_layers": 5}},
    skip={
        "key:num_local_experts": "another name of num_experts",
        "swap:model.layers.1.self_attn.q_norm.weight": "without positions only the product of both counts",
    },
)
