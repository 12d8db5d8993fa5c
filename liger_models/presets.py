"""Presets: config.json of well-known models, for random initialisation.

liger_models.from_config(preset("llama-3.2-1b"), dtype=torch.bfloat16, device="cuda")
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterator
from typing import Any

from liger_models.convert.errors import ConfigError, HubError


def preset(
    name: str, *, vocab_size: int | None = None, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """Copy of a preset's config.json, adapted to a tokenizer's sizes and ids if given.

    Raises ConfigError for an unknown name, listing the known ones.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"unknown preset {name!r}{hint}; expected one of {', '.join(PRESETS)}")
    config = copy.deepcopy(PRESETS[name])
    if vocab_size is not None:  # another tokenizer: its ids replace the preset's, known or not
        config |= {"vocab_size": vocab_size, "bos_token_id": bos, "eos_token_id": eos}
        if "vocab_size_per_layer_input" in config:
            config["vocab_size_per_layer_input"] = vocab_size
    return config


@contextlib.contextmanager
def naming_presets(name: str) -> Iterator[None]:
    """Add the preset whose name is nearest to `name` to a HubError about it."""
    try:
        yield
    except HubError as error:
        if near := difflib.get_close_matches(name, PRESETS, n=1):
            raise HubError(f"{error}; the nearest preset is {near[0]}") from error
        raise


def _llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def _sized(model_type: str, architecture: str, *sizes: int, **changes: Any) -> dict[str, Any]:
    """`sizes`: hidden, intermediate, layers, heads, key/value heads, vocabulary. There is no padding row,
    since its id belongs to the tokenizer.
    """
    keys = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size"),
    )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pad_token_id": None,
        "use_cache": True,
        **dict(zip(keys, sizes, strict=True)),
        **changes,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # 4.0 million parameters with a vocabulary of 4096: minutes on two CPU cores.
    "llama-demo": _llama(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        vocab_size=4096,
        tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _llama(
        **_llama3_rope(32.0),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama(
        **_llama3_rope(8.0),
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "llama-2-7b": _llama(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        vocab_size=32000,
    ),
    "mistral-7b-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "granite-3.1-2b": _sized(
        "granite",
        "GraniteForCausalLM",
        *(2048, 8192, 40, 32, 8, 49155),
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        max_position_embeddings=131072,
        mlp_bias=False,
        rms_norm_eps=1e-5,
        rope_theta=5000000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "smollm3-3b": _sized(
        "smollm3",
        "SmolLM3ForCausalLM",
        *(2048, 11008, 36, 16, 4, 128256),
        max_position_embeddings=65536,
        mlp_bias=False,
        no_rope_layer_interval=4,
        rms_norm_eps=1e-6,
        rope_theta=5000000.0,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128012,
    ),
    "olmo-3-7b": _sized(
        "olmo3",
        "Olmo3ForCausalLM",
        *(4096, 11008, 32, 32, 32, 100278),
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=100257,
    ),
    "glm-4-9b": _sized(
        "glm4",
        "Glm4ForCausalLM",
        *(4096, 13696, 40, 32, 2, 151552),
        attention_bias=True,
        head_dim=128,
        max_position_embeddings=32768,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=[151329, 151336, 151338],
    ),
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "pad_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "phi-3.5-moe": _sized(
        "phimoe",
        "PhimoeForCausalLM",
        *(4096, 6400, 32, 32, 8, 32064),
        num_local_experts=16,
        num_experts_per_tok=2,
        router_jitter_noise=0.01,
        input_jitter_noise=0.01,
        attention_bias=True,
        lm_head_bias=True,
        max_position_embeddings=4096,  # longrope came with a later phase of its training
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=32000,
    ),
    "llama-4-scout": _sized(
        "llama4_text",
        "Llama4ForCausalLM",
        *(5120, 8192, 48, 40, 8, 202048),
        attention_chunk_size=8192,
        attn_scale=0.1,
        attn_temperature_tuning=True,
        floor_scale=8192,
        head_dim=128,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=16384,
        no_rope_layer_interval=4,
        num_experts_per_tok=1,
        num_local_experts=16,
        use_qk_norm=True,
        max_position_embeddings=10485760,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        bos_token_id=200000,
        eos_token_id=[200001, 200007, 200008],
    ),
    "olmoe-1b-7b": _sized(
        "olmoe",
        "OlmoeForCausalLM",
        *(2048, 1024, 16, 16, 16, 50304),
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        output_router_logits=True,  # adds the load balancing loss
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        eos_token_id=50279,
    ),
}

PARAMETERS: dict[str, int] = {
    "llama-demo": 4_000_000,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b-v0.3": 7_248_023_552,
    "granite-3.1-2b": 2_533_531_648,
    "smollm3-3b": 3_075_098_624,
    "olmo-3-7b": 7_298_011_136,
    "gemma-4-e2b": 4_628_569_344,
    "phi-3.5-moe": 41_873_153_344,
    "olmoe-1b-7b": 6_919_161_856,
    "llama-4-scout": 107_769_861_120,  # of the text part; computed
    "glm-4-9b": 9_400_279_040,
}
"""Number of parameters of each preset, as published with the models; the demonstration is ours."""
