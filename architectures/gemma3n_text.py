"""Gemma 3n (Google DeepMind, 2025), its text models: Gemma 3 on four residual streams of which each layer
computes one (AltUp), with a low-rank branch next to attention (LAuReL), per-layer embeddings, keys and values
shared among later layers, and sparse gates in the first ones.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    gemma,
    local_rope,
    share_keys,
    unread_keys,
    windows,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec, PerLayerInputSpec, QKNormSpec

NAMES = ((".per_layer_inputs.", "."), (".per_layer_input.", "."), (".stream_ends.", "."))


def unread(c: HFConfig) -> tuple[str, ...]:
    """Patterns of tensors that no layer reads: keys of layers that share others', and unused scales."""
    scales = () if c.take_flag("altup_correct_scale", True) else ("model.layers.*.correct_output_scale",)
    return (*unread_keys(c), *scales)


@register(
    "gemma3n_text",
    reference="Gemma3nForCausalLM",
    layouts=(Layout(NAMES),),
    carried=unread,
    defaults={
        **gemma.DEFAULTS,
        **{"num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 512},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "laurel_rank": 64},
        **{"altup_num_inputs": 4, "altup_active_idx": 0, "altup_coef_clip": 120.0},
        **{"num_kv_shared_layers": 15, "final_logit_softcapping": 30.0},
    },
)
def gemma3n_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), cast="gemma")
    attn = attention(c, bias=c.take_flag("attention_bias", False), layer_type=FULL, theta=1e6)
    attn = replace(attn, scale=1.0, qk_norm=QKNormSpec(norm, values=True))
    local = local_rope(c, attn.head_dim)
    slides = windows(c, lambda i: SLIDING if (i + 1) % 5 else FULL)
    mixers = [attn if window is None else replace(attn, window=window, rope=local) for window in slides]
    streams, rank = gemma.alternating_streams(c), c.take_count("laurel_rank")
    own = PerLayerInputSpec(c.take_count("hidden_size_per_layer_input"), activation(c, "hidden_activation"))
    blocks = [
        BlockSpec(mixer, mlp, norm, "altup", per_layer_input=own, streams=streams, laurel_rank=rank)
        for mixer, mlp in zip(share_keys(c, mixers), gemma.sparse_mlps(c), strict=True)
    ]
    ids = c.take_count("vocab_size_per_layer_input")
    return gemma.scaled_decoder(c, blocks, norm, per_layer_vocab_size=ids)


# -- tests

for_tests(
    "gemma3n_text",
    tiny={
        **gemma.TINY,
        "num_hidden_layers": 4,
        "intermediate_size": [40, 36, 44, 40],
        "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0],
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 131,
        "laurel_rank": 6,
        "rms_norm_eps": 0.3,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    variants={
        "one width, unscaled": {"intermediate_size": 40, "altup_correct_scale": False},
        "every_fifth": {
            "num_hidden_layers": 11,
            **dict.fromkeys(("layer_types", "activation_sparsity_pattern"), ...),
            **{"intermediate_size": 40, "num_kv_shared_layers": 0, "rms_norm_eps": 1.0},
        },
        "clamped": {"altup_coef_clip": 0.05},
        "fewer_ids": {"vocab_size_per_layer_input": 101},
        "thetas": {"rope_parameters": ..., "rope_theta": 500.0, "rope_local_base_freq": 100.0},
    },
    skip={
        "rope:yarn_fractional": "of settings by layer type the reference does not read truncate",
        **{
            f"field:RopeSpec.{name}": "seen without truncation"
            for name in ("truncate", "beta_fast", "beta_slow")
        },
    },
)
