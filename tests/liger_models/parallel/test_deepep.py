"""Tokens sent by DeepEP's interface give the bits that torch's collectives give. The library itself needs
GPUs and is not run here: a stand-in has its interface.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.experts.deepep_tokens import TokenBuffer
from liger_models.layers.experts.expert_parallel import divide_experts

RANK = Path(__file__).with_name("deepep_rank.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_both_ways_of_sending_tokens_give_the_same_bits(tmp_path):
    levels = ("lean", "mlp", "checkpoint")
    for found, calls in run_ranks(RANK, tmp_path):
        for level in levels:
            (loss, gradients), (true_loss, true) = found["deepep", level], found["standard", level]
            assert torch.equal(loss, true_loss)
            for name, gradient in gradients.items():
                assert torch.equal(gradient, true[name]), f"{level} {name}"
            assert any(g.abs().max() > 0 for n, g in gradients.items() if "experts" in n)
        # One buffer for all layers. Each pass sends and sums once a layer, so does its gradient; a recomputed
        # MLP sends rows by the layout it has, a recomputed layer chooses its experts anew.
        model = liger_models.from_config(find_architecture("qwen3_moe").tiny, device="meta")
        layers = sum(hasattr(module, "exchange") for module in model.modules())
        assert calls.count("buffer") == 1
        assert calls.count("dispatch") == (3 + 1) * layers
        assert calls.count("again") == (3 + 1) * layers


def group_of(ranks):
    return SimpleNamespace(size=lambda: ranks, rank=lambda: 0)


def test_a_missing_deep_ep_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ValueError, match=r"requires deep_ep .*install it from"):
        TokenBuffer(group_of(2))


def test_unknown_backends_ranks_and_dtypes_are_errors(monkeypatch):
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    with pytest.raises(ValueError, match="expert_comm_backend is 'deep_ep'; expected one of"):
        divide_experts(liger_models.from_config(find_architecture("qwen3_moe").tiny), mesh, None, "deep_ep")

    def configs(ranks):
        assert ranks != 3, "Unsupported number of EP ranks: 3"

    module = types.ModuleType("deep_ep")
    module.Buffer = SimpleNamespace(get_dispatch_config=configs, get_combine_config=configs)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    with pytest.raises(ValueError, match="no settings for 3 ranks"):
        TokenBuffer(group_of(3))
    with pytest.raises(ValueError, match=r"in bfloat16, found torch\.float32"):
        TokenBuffer(group_of(2)).of(torch.zeros(2, 4))
