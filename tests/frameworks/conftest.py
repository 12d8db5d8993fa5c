"""A small model with random parameters, for tests of other tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from randomised import randomise

import liger_models
from liger_models.models.causal_lm import LigerCausalLM


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    """LLaMA with two layers."""
    return {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


@pytest.fixture(scope="session")
def make_model(tiny_config) -> Callable[..., LigerCausalLM]:
    """Factory: `make_model(tie_word_embeddings=False)` uses the tiny config with changes."""

    def make(activation_memory: str = "lean", **changes: Any) -> LigerCausalLM:
        model = liger_models.from_config(tiny_config | changes, activation_memory=activation_memory)
        return randomise(model, torch.Generator().manual_seed(7))

    return make
