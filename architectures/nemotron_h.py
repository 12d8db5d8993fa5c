"""Nemotron-H and Nemotron Nano 2 (NVIDIA, 2025, arXiv:2504.03624): layers of one part each, state space
layers, a few of attention without positions, and MLPs with squared ReLU. Layers of experts are not supported.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, LINEAR, check_groups, decoder, mlp, part_types, ssd
from liger_models.architectures.mamba2 import INITIALISATION, KEYS, NAMES, OF_ATTENTION
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, MixerSpec, ModelSpec, NormSpec

OF_STATES = {**KEYS, "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state": "ssm_state_size"}
OF_STATES["activation"] = "mamba_hidden_act"
PARTS = (*NAMES, ("model.norm.", "model.norm_f."), (".self_attn.", ".mixer."), (".mlp.", ".mixer."))

NOT_READ = """
    attention_bias attention_head_dim chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype
    num_logits_to_keep residual_in_fp32 rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window time_step_limit use_mamba_kernels
"""
OF_EXPERTS = """
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
    n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor
    topk_group mtp_layers_block_type mtp_hybrid_override_pattern
"""


@register(
    "nemotron_h",
    reference="NemotronHForCausalLM",
    layouts=(Layout(PARTS, root="backbone."), Layout(PARTS, root="model.")),
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "time_step_min": 0.001,
    },
    carried=lambda c: ("mtp.*",),
    unread={
        **{key: "concerns fresh weights alone" for key in INITIALISATION if key != "time_step_min"},
        **dict.fromkeys(NOT_READ.split(), "the reference does not read it, or the result is the same"),
        **dict.fromkeys(OF_EXPERTS.split(), "of layers of experts, or of layers that do not run"),
    },
)
def nemotron_h(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5), cast="float32")
    heads, kv_heads = c.take_count("num_attention_heads"), c.take_count("num_key_value_heads")
    head_dim = c.take_count("head_dim", 128)
    check_groups(c, heads, kv_heads)
    c.take("max_position_embeddings", None)  # there are no positions
    size = c.take_count("mamba_num_heads") * c.take_count("mamba_head_dim")
    mamba = ssd(c, size, norm.eps, OF_STATES, dt_min=c.take_number("time_step_min"))
    feed_forward = mlp(c, bias=c.take_flag("mlp_bias", False), gated=False, key="mlp_hidden_act")
    kinds = part_types(c)
    if "moe" in kinds:
        raise ConfigError(
            f"{c.name}: layer {kinds.index('moe')} has experts without gates, which are not supported"
        )
    attn = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=None)
    mixers: dict[str, MixerSpec] = {LINEAR: mamba, FULL: attn}
    blocks = [
        BlockSpec(mixers.get(kind), None if kind in mixers else feed_forward, norm, "one_part")
        for kind in kinds
    ]
    # The reference never ties the head.
    return replace(decoder(c, blocks, norm), padding_idx=None, tie_word_embeddings=False)


# -- tests

for_tests(
    "nemotron_h",
    tiny={
        **{key: ... for key in OF_ATTENTION if key.endswith(("eps", "parameters", "embeddings"))},
        "hidden_act": ...,
        "layer_norm_epsilon": 1e-2,
        "layers_block_type": [LINEAR, FULL, "mlp"],
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "ssm_state_size": 10,
        "n_groups": 3,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_bias": True,
        "mlp_hidden_act": "relu2",
        "time_step_min": 0.001,
    },
    variants={
        "pattern": {"layers_block_type": ..., "hybrid_override_pattern": "-*M"},
        "older_names": {"layers_block_type": ["mlp", "attention", "mamba"]},
        "newer_names": {"layers_block_type": ..., "layer_types": [FULL, "mlp", LINEAR]},
        "another_activation": {"mlp_hidden_act": "silu"},
        "longer_steps": {"time_step_min": 0.6},
        "two_of_states": {"layers_block_type": [LINEAR, "mlp", LINEAR]},
    },
    skip={
        "key:tie_word_embeddings": "the reference never ties the head",
        "key:num_hidden_layers": "it is the number of types",
        "refusal:head_dim_by_division": "head_dim has a default",
        "refusal:odd_head_dim": "there are no positions",
        "key:mamba_hidden_act": "the convolutions have SiLU alone",
    },
)
