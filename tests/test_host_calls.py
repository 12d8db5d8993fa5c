"""The host's work for a layer of a training step: calls of our functions, and our calls of functions in C.
Small steps are limited by this work, and no other test notices work that is done again and again.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import liger_models
from liger_models.kernels.recurrent.state_spaces import _ssd_chunks

FOLDERS = tuple(f"{Path(module.__file__).parent}/" for module in (liger_models.kernels, liger_models.layers))
SMALL = {"hidden_size": 128, "vocab_size": 64}
MODELS = {
    "llama": {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
    # Four slices of one head in the backward pass, and tiles of the copy engine, as on a Hopper GPU.
    "mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2},
}
# As counted, and 3% for other versions of torch, which call our hooks for other tensors.
MOST = {("llama", "lean"): 713, ("mamba2", "lean"): 1068, ("mamba2", "all"): 811}


def calls_of_a_step(family, level, layers):
    """Calls, and launches of kernels, which do nothing."""
    torch.manual_seed(0)
    config = {"model_type": family, "num_hidden_layers": layers, **SMALL, **MODELS[family]}
    model = liger_models.from_config(config, dtype="bfloat16", activation_memory=level)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 64))
    calls = Counter()

    def count(frame, event, arg):
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(FOLDERS):
            calls[event] += 1

    for repeat in range(2):  # the first step fills caches
        gc.collect()
        sys.setprofile(count if repeat else None)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        finally:
            sys.setprofile(None)
    return calls.total()


@pytest.mark.parametrize(("family", "level"), MOST)
def test_a_layer_takes_few_calls_of_the_host(family, level, interpreted, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *_, **__: None)
    monkeypatch.setattr(_ssd_chunks, "LEAST_SLICE", 0)
    few, more = (calls_of_a_step(family, level, layers) for layers in (2, 4))
    assert (more - few) / 2 <= MOST[family, level]
