"""Jamba (AI21, 2024, arXiv:2403.19887): Mamba's selective scan with normalised steps, B and C, attention
without positions in a few layers, and an MLP or experts in each.
"""

from liger_models.architectures.bamba import NAMES
from liger_models.architectures.common import attention, chosen_experts, decoder, mlp, selective
from liger_models.architectures.mamba import KERNELS, STEP_BIAS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

KEYS = {
    "state": "mamba_d_state",
    "step_rank": "mamba_dt_rank",
    "conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "activation": "hidden_act",
}
NOT_READ = """
    calc_logits_for_entire_prompt mamba_inner_layernorms num_logits_to_keep rope_parameters
    rope_scaling rope_theta sliding_window use_mamba_kernels
"""


@register(
    "jamba",
    reference="JambaForCausalLM",
    layouts=(Layout((STEP_BIAS, *NAMES)), Layout((STEP_BIAS, *NAMES), whole=("*.experts.*",))),
    defaults={
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "pad_token_id": 0,
    },
    unread=dict.fromkeys(
        (*NOT_READ.split(), *KERNELS), "the reference does not read it, or the result is the same"
    ),
)
def jamba(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6))
    attn = attention(c, positions=False)
    c.take("max_position_embeddings", None)  # there are no positions
    channels = c.take_count("mamba_expand") * c.take_count("hidden_size")
    mamba = selective(c, channels, KEYS, norms="weighted", norm_eps=norm.eps)
    dense = mlp(c)
    experts: MLPSpec | MoESpec = dense
    if c.take_count(("num_experts", "num_local_experts")) > 1:
        experts = chosen_experts(c, size="intermediate_size", renormalize=False)
    else:
        for key in ("num_experts_per_tok", "router_aux_loss_coef", "output_router_logits"):
            c.take(key, None)  # of experts
    count = c.take_count("num_hidden_layers")
    attending, routing = every(c, "attn_layer", count, 8, 4), every(c, "expert_layer", count, 2, 1)
    parts = ((attn if i in attending else mamba, experts if i in routing else dense) for i in range(count))
    blocks = [BlockSpec(mixer, inner, norm) for mixer, inner in parts]
    return decoder(c, blocks, norm)


def every(c: HFConfig, name: str, count: int, period: int, offset: int) -> range:
    """The layers of a kind: every period-th one, from an offset below that period."""
    first = c.take_count(f"{name}_offset", offset, least=0)
    step = c.take_count(f"{name}_period", period)
    if first >= step:
        raise ConfigError(f"{c.name}: {name}_offset is {first}; expected less than {name}_period, {step}")
    return range(first, count, step)


# -- tests

for_tests(
    "jamba",
    tiny={
        "rope_parameters": ...,
        "max_position_embeddings": ...,
        "num_hidden_layers": 3,
        "intermediate_size": 32,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_dt_rank": 6,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rms_norm_eps": 1e-2,
        "pad_token_id": 7,
    },
    variants={
        "no_experts": {"num_experts": 1},
        "rank_by_division": {"mamba_dt_rank": "auto"},
        "wider": {"mamba_expand": 3},
        "attention_first": {"attn_layer_period": 2, "attn_layer_offset": 0},
    },
    skip={
        "refusal:odd_head_dim": "there are no positions",
        **{
            f"swap:model.layers.{i}.mamba.b_layernorm.weight": "only the product of both weights counts"
            for i in range(3)
        },
        "key:num_local_experts": "another name of num_experts",
        "key:hidden_act": "the convolutions have only SiLU",
        "variant:hidden_act": "the convolutions have only SiLU",
    },
)
