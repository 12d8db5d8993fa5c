"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA, 2025, arXiv:2504.03624, arXiv:2512.20848): one part per
layer: a state space layer, in a few layers attention without positions, or an MLP or experts with squared
ReLU. The experts are routed as in DeepSeek-V3, and in Nemotron 3 Super and Ultra work in a latent space.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, LINEAR, check_groups, decoder, mlp, part_types, ssd
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, routed_and_shared_experts
from liger_models.architectures.common.state_space import EXPERTS, MLP, step_biases
from liger_models.architectures.mamba2 import KEYS, NAMES, OF_ATTENTION
from liger_models.architectures.mamba2 import NOT_READ as UNREAD_STATES
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    Fresh,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    Uniform,
)

OF_STATES = {**KEYS, "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state": "ssm_state_size"}
OF_STATES["activation"] = "mamba_hidden_act"
PARTS = (
    *NAMES,
    ("model.norm.", "model.norm_f."),
    *((".router.correction_bias", ".gate.e_score_correction_bias"), (".router.", ".gate."), SHARED_EXPERTS),
    *((".self_attn.", ".mixer."), (".mlp.", ".mixer.")),
)
STACKED = ("*.experts.*",)

NOT_READ = """
    attention_bias attention_head_dim chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype
    keep_mtp_spec_in_bf16 moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
    n_shared_experts norm_eps
    num_logits_to_keep residual_in_fp32 rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window time_step_limit use_mamba_kernels
"""


@register(
    "nemotron_h",
    reference="NemotronHForCausalLM",
    layouts=tuple(Layout(PARTS, whole, root=r) for whole in ((), STACKED) for r in ("backbone.", "model.")),
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
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    carried=lambda c: ("mtp.*",),
    unread={
        **dict.fromkeys(
            (*NOT_READ.split(), *UNREAD_STATES), "the reference does not read it, or the result is the same"
        ),
    },
)
def nemotron_h(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("layer_norm_epsilon", 1e-5), cast="float32")
    heads, kv_heads = c.take_count("num_attention_heads"), c.take_count("num_key_value_heads")
    head_dim = c.take_count("head_dim", 128)
    check_groups(c, heads, kv_heads)
    for unused in ("max_position_embeddings", "partial_rotary_factor"):
        c.take(unused, None)  # there are no positions
    size = c.take_count("mamba_num_heads") * c.take_count("mamba_head_dim")
    mamba = ssd(c, size, norm.eps, OF_STATES, dt_min=c.take_number("time_step_min"))
    bias, kinds = c.take_flag("mlp_bias", False), part_types(c)
    feed_forward = mlp(c, bias=bias, gated=False, key="mlp_hidden_act")
    experts = routed_and_shared_experts(
        c,
        plain="mlp_hidden_act",
        shared_size=c.take_count("moe_shared_expert_intermediate_size"),
        bias=bias,
        score="sigmoid",
        renormalize=c.take_flag("norm_topk_prob", True),
        correction_bias=True,
        float32_router=True,
        latent_size=(latent := c.take_count("moe_latent_size", None)),
        latent_bias=bias and latent is not None,
    )
    if EXPERTS in kinds and experts.gated:
        raise ConfigError(
            f"{c.name}: mlp_hidden_act is {experts.activation!r}; experts without gates have only 'relu2'"
        )
    attn = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, rope=None)
    mixers: dict[str, MixerSpec] = {LINEAR: mamba, FULL: attn}
    mlps: dict[str, MLPSpec | MoESpec] = {MLP: feed_forward, EXPERTS: experts}
    blocks = [BlockSpec(mixers.get(kind), mlps.get(kind), norm, "one_part") for kind in kinds]
    fresh: tuple[tuple[str, Fresh], ...] = (("*.mamba.dt_bias", step_biases(c)),)
    if c.take_flag("rescale_prenorm_residual", True):
        fresh += (("*.mamba.out_proj.weight", Uniform((size * len(blocks)) ** -0.5)),)
    # The reference never ties the head.
    return replace(decoder(c, blocks, norm), padding_idx=None, tie_word_embeddings=False, fresh=fresh)


# -- tests

for_tests(
    "nemotron_h",
    tiny={
        "num_hidden_layers": 4,
        **{key: ... for key in OF_ATTENTION if key.endswith(("eps", "parameters", "embeddings"))},
        "hidden_act": ...,
        "layer_norm_epsilon": 1e-2,
        "layers_block_type": [LINEAR, FULL, "mlp", "moe"],
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
        "time_step_max": 0.2,
        "time_step_floor": 0.004,
        "rescale_prenorm_residual": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 36,
        "moe_latent_size": 20,
    },
    variants={
        "pattern": {"layers_block_type": ..., "hybrid_override_pattern": "-*ME"},
        "older_names": {"layers_block_type": ["mlp", "attention", "mamba", "moe"]},
        "newer_names": {"layers_block_type": ..., "layer_types": ["moe", FULL, "mlp", LINEAR]},
        "another_activation": {"mlp_hidden_act": "silu", "layers_block_type": ["mlp", LINEAR, "mlp", FULL]},
        "experts_in_groups": {"n_group": 3, "topk_group": 2},
        "experts_not_latent": {"moe_latent_size": None},
        "longer_steps": {"time_step_min": 0.6, "rescale_prenorm_residual": False},
        "two_of_states": {"layers_block_type": [LINEAR, "mlp", LINEAR, "moe"]},
    },
    skip={
        "swap:model.layers.3.mlp.fc2_latent_proj.bias": "only the sum of both counts",
        "key:tie_word_embeddings": "the reference never ties the head",
        "key:num_hidden_layers": "it is the number of types",
        "refusal:head_dim_by_division": "head_dim has a default",
        "refusal:odd_head_dim": "there are no positions",
        "key:mamba_hidden_act": "the convolutions have only SiLU",
    },
)
