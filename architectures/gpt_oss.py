"""gpt-oss (OpenAI, 2025, arXiv:2508.10925): attention sinks, a sliding window on every other layer, biases
everywhere, and experts with a clamped activation. Checkpoints store the experts stacked and transposed, with
gate and up interleaved.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, aux_loss_coef, decoder, experts_and_chosen, windows
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ClampedSwiGLU, ModelSpec, MoESpec, NormSpec

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@register(
    "gpt_oss",
    reference="GptOssForCausalLM",
    layouts=(
        Layout(
            whole=("*.experts.*",),
            permuted=(
                ("*.gate_up_proj", "e h (i 2) -> e (2 i) h"),
                ("*.gate_up_proj_bias", "e (i 2) -> e (2 i)"),
                ("*.experts.down_proj", "e i h -> e h i"),
            ),
        ),
    ),
    says_transposed=True,
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
    },
    unread=dict.fromkeys(("hidden_act", "initial_context_length"), "the reference does not read it"),
)
def gpt_oss(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5), cast="float32")
    attn = attention(c, bias=c.take_flag("attention_bias", True), theta=150000.0, scaling=YARN)
    moe = MoESpec(
        *experts_and_chosen(c, chosen_keys=("num_experts_per_tok", "experts_per_token")),
        intermediate_size=c.take_count("intermediate_size"),
        activation=ClampedSwiGLU(c.take_number("swiglu_alpha", 1.702), c.take_number("swiglu_limit", 7.0)),
        bias=True,
        router_bias=True,
        softmax_after_top_k=True,
        aux_loss_coef=aux_loss_coef(c),
    )
    slides = windows(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    return decoder(c, [BlockSpec(replace(attn, sinks=True, window=w), moe, norm) for w in slides], norm)


# -- tests

for_tests(
    "gpt_oss",
    tiny={
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "attention_bias": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "hidden_act": ...,
        "rope_parameters": {**YARN, "rope_theta": 1e5, "factor": 8.0, "original_max_position_embeddings": 16},
    },
    variants={
        "clamped_elsewhere": {"swiglu_alpha": 1.5, "swiglu_limit": 1.0},
        "layer_types": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        "not_stretched": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "nothing_said_of_rotation": {"rope_parameters": {}},
    },
    skip={
        "key:num_experts": "num_local_experts",
        "key:experts_per_token": "num_experts_per_tok",
        "field:MoESpec.softmax_after_top_k": "renormalised shares of all are the same function",
        "field:MoESpec.renormalize": "the same",
        "rope:default": "in the old spelling, a config that says nothing is stretched",
    },
)
