"""Models of the training step benchmarks: configs by name, whole or truncated to their first layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from liger_models.architectures import find_architecture
from liger_models.cards.published import FOLDER, read_config, with_layers

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: Any):
    return _LLAMA | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        **others,
    }


def _published(name: str, layers: int | None = None, **changes: Any) -> dict[str, Any]:
    """A model's own config.json, with changed sizes or truncated to its first layers."""
    config = {**read_config(ROOT / FOLDER / f"{name}.json"), **changes}
    return with_layers(config, layers) if layers else config


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, **others: Any) -> dict[str, Any]:
    """Qwen3-8B's config with another model's sizes (Qwen3 technical report, arXiv:2505.09388, table 1)."""
    changes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _published("Qwen3-8B", intermediate_size=intermediate, **changes, **others)


def _vision_model(family: str, **changes: Any) -> dict[str, Any]:
    """Tiny config of a vision-language family, with changes to its language model."""
    tiny = find_architecture(family).tiny
    return {**tiny, "text_config": {**tiny["text_config"], **changes}}


# A small vocabulary, so that the head does not hide so few layers.
_FEW_IDS = {"vocab_size": 32768, "bos_token_id": None, "eos_token_id": None}

# "-6" is a number of layers that fits on one GPU.
MODELS: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336),
    "llama-3-70b": _published("Llama-3.1-70B"),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, tie_word_embeddings=True),
    "tiny": _llama(256, 2, 4, 2, 512, vocab_size=1024),
    "qwen2-0.5b": _published("Qwen2.5-0.5B"),  # the same sizes
    "qwen3-0.6b": _published("Qwen3-0.6B"),
    "gemma-2-2b": _published("gemma-2-2b"),
    "gemma-3-1b": _published("gemma-3-1b-pt"),
    "gemma-3-4b": _published(
        "gemma-3-1b-pt",
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=1024,
        vocab_size=262208,
    ),
    "gemma-3-12b": _published("gemma-3-12b-it"),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_word_embeddings=True),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "qwen3-30b-a3b": _published("Qwen3-30B-A3B"),
    "qwen3-30b-a3b-6": _published("Qwen3-30B-A3B", 6),
    "gpt-oss-20b": _published("gpt-oss-20b"),
    "gpt-oss-120b": _published("gpt-oss-120b"),
    "gpt-oss-20b-6": _published("gpt-oss-20b", 6),
    "gpt-oss-20b-12": _published("gpt-oss-20b", 12),
    "mixtral-8x7b-4": _published("Mixtral-8x7B-v0.1", 4),
    "qwen2.5-vl-7b": _published("Qwen2.5-VL-7B-Instruct"),
    "gemma-3-4b-it": _published("gemma-3-4b-it"),
    "llama-3.2-11b-vision": _published("Llama-3.2-11B-Vision-Instruct"),
    "tiny-gpt-oss": _published(
        "gpt-oss-20b",
        2,
        hidden_size=64,
        intermediate_size=64,
        num_local_experts=4,
        vocab_size=1024,
        pad_token_id=None,
    ),
    "tiny-vl": _vision_model("qwen2_5_vl", max_position_embeddings=4096),
    "qwen3-next-4": _published("Qwen3-Next-80B-A3B-Instruct", 4, **_FEW_IDS),
    "qwen3.5-9b-4": _published(
        "Qwen3.5-27B-text",
        4,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=16,
        linear_num_value_heads=32,
        **_FEW_IDS,
    ),
    # As many layers as show every kind, in the model's own order where that is possible.
    "granite-4-h-small-4": _published(
        "granite-4.0-h-small", 4, **_FEW_IDS, pad_token_id=None, layer_types=["mamba"] * 3 + ["attention"]
    ),
    "granite-4-h-micro-10": _published("granite-4.0-h-micro", 10, **_FEW_IDS, pad_token_id=None),
    "nemotron-h-8b-9": _published(
        "Nemotron-H-8B-Base-8K",
        **_FEW_IDS,
        pad_token_id=None,
        num_hidden_layers=9,
        hybrid_override_pattern="M-M-M*-M-",
    ),
    # The widths in Megatron-Bridge's recipe for NVIDIA-Nemotron-3-Nano-4B.
    "nemotron-3-nano-4b": _published(
        "Nemotron-H-8B-Base-8K",
        hidden_size=3136,
        intermediate_size=12544,
        num_attention_heads=40,
        mamba_num_heads=96,
        mamba_head_dim=80,
        num_hidden_layers=42,
        hybrid_override_pattern="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    ),
    "lfm2-2.6b-8": _published(
        "LFM2-1.2B",
        8,
        **_FEW_IDS,
        pad_token_id=None,
        block_ff_dim=10752,
        block_auto_adjust_ff_dim=False,
        full_attn_idxs=[2, 5],
    ),
    "deepseek-v3-2": _published("DeepSeek-V3", 2, first_k_dense_replace=1),  # one dense, one of experts
}


# Vision-language models: layers of the language model measured with the whole encoder. All, or as many as fit
# 140 GB with liger-kernel, too, with three rows.
VISION_MODELS: Mapping[str, int] = {"qwen2.5-vl-7b": 28, "gemma-3-4b-it": 34, "llama-3.2-11b-vision": 24}


def config_of(model: str, layers: int | None = None, seq: int = 0) -> dict[str, Any]:
    """Config of a name in `MODELS`, or of a file: a config.json, or {"config": ...}; extended to `seq`
    tokens."""
    config = MODELS[model] if model in MODELS else read_config(Path(model))
    config = with_layers(config, layers) if layers else dict(config)
    if config.get("max_position_embeddings", seq) < seq:
        config["max_position_embeddings"] = seq
    return config
