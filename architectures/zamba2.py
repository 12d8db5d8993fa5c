"""Zamba 2 (Zyphra, 2024, arXiv:2411.15242): Mamba 2's state space layers; before some of them, attention and
an MLP that also read the embeddings, with shared weights and adapters per layer.
"""

from liger_models.architectures.common import LINEAR, activation, decoder, ssd
from liger_models.architectures.common.shared_transformer import (
    HYBRID,
    IN_LAYERS,
    NAMES,
    hybrid_layers,
    types_of_layers,
    wide_attention,
)
from liger_models.architectures.common.state_space import step_biases
from liger_models.architectures.mamba2 import INITIALISATION
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec, SharedSpec

KEYS = {
    "heads": "n_mamba_heads",
    "head_dim": "mamba_headdim",
    "groups": "mamba_ngroups",
    "state": "mamba_d_state",
    "conv": "mamba_d_conv",
    "bias": "add_bias_linear",
}
STEPS = ("time_step_floor", "time_step_max", "time_step_min")
NOT_READ = """
    attention_head_dim attention_hidden_size head_dim hybrid_layer_ids kv_channels num_query_groups
    use_conv_bias use_mamba_kernels use_mem_eff_path
"""
DEFAULT_HYBRIDS = (*range(6, 43, 6), 47, 51)
"""Indices of the layers with attention, of 54."""


@register(
    "zamba2",
    reference="Zamba2ForCausalLM",
    layouts=(Layout(NAMES, ("*.mlp.gate_up_proj.*",), in_layers_with=IN_LAYERS),),
    defaults={
        "num_attention_heads": 32,
        "hidden_act": "gelu",
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "time_step_min": 0.001,
        "num_mem_blocks": 1,
        "adapter_rank": 128,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    fixed={"use_long_context": False},
    unread={
        **{key: "the reference does not read it" for key in INITIALISATION if key not in STEPS},
        "chunk_size": "a setting of the reference's kernel, with the same results",
        "num_logits_to_keep": "a setting of generation",
        **dict.fromkeys(NOT_READ.split(), "it follows from others, or the reference does not read it"),
    },
)
def zamba2(c: HFConfig) -> ModelSpec:
    norm, hidden_size = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), c.take_count("hidden_size")
    mamba = ssd(
        c, c.take_count("mamba_expand") * hidden_size, 1e-5, KEYS, dt_min=c.take_number("time_step_min")
    )
    width = c.take_count("intermediate_size", 4 * hidden_size)
    feed_forward = MLPSpec(width, activation(c), c.take_flag("add_bias_linear", False))
    plain = BlockSpec(mamba, None, norm, "one_part")
    hybrid = BlockSpec(mamba, feed_forward, norm, "shared_transformer", second_mixer=wide_attention(c))
    types = types_of_layers(c, lambda: [HYBRID if i in DEFAULT_HYBRIDS else LINEAR for i in range(54)])
    adapts = c.take_flag("use_shared_attention_adapter", False)
    shared = SharedSpec(0, 0, c.take_count("adapter_rank"), adapts)
    fresh = (("*.mamba.dt_bias", step_biases(c)),)
    return decoder(c, hybrid_layers(c, types, plain, hybrid, shared), norm, fresh=fresh)


# -- tests

for_tests(
    "zamba2",
    tiny={
        "head_dim": ...,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1.0,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 10,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_ngroups": 3,
        "n_mamba_heads": 12,
        "time_step_min": 0.001,
        "time_step_max": 0.2,
        "time_step_floor": 0.004,
        "add_bias_linear": False,
        "hidden_act": "silu",
        "num_mem_blocks": 1,
        "adapter_rank": 5,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "pad_token_id": 7,
        "tie_word_embeddings": True,
    },
    variants={
        "limited_steps": {"time_step_min": 0.5},
        "in_turn": {"num_mem_blocks": 2, "layers_block_type": ["hybrid"] * 3},
        "older_names": {"layers_block_type": ["mamba", "hybrid", "hybrid"]},
        "grouped": {"num_key_value_heads": 2, "use_shared_attention_adapter": False},
        "wider": {"mamba_expand": 3, "n_mamba_heads": 18},
    },
    skip={
        "key:tie_word_embeddings": "it must be true",
        "key:mamba_headdim": "it follows from the number of heads",
        "key:num_hidden_layers": "there are as many as types",
        "variant:one_kv_head": "the reference's adapters of keys are as wide as all heads; see grouped",
        "variant:tie_word_embeddings=False": "transformers would then share no weights at all",
    },
)
