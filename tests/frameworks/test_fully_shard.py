"""FSDP2 with the usual policy (compute in bf16, reduce in float32) trains like one process.

The policy casts floating-point tensors among the arguments of every layer, but not when a layer is recomputed
in the backward pass.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from randomised import randomise
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture
from liger_models.layers.recompute.activation_memory import LEVELS

RANK = Path(__file__).with_name("fully_shard_rank.py")
CASES = [(level, torch.float32) for level in LEVELS]
CASES += [(level, torch.bfloat16) for level in ("lean", "checkpoint")]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)


def run_alone(model, batch, ranks, num_items):
    """Run the shares of all ranks one by one in a bf16 model; return losses and mean float32 gradients."""
    losses, sums = [], {}
    for rank in range(ranks):
        model.zero_grad()
        share = {name: value.chunk(ranks)[rank] for name, value in batch.items()}
        loss = model(**share, num_items_in_batch=num_items).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad.cpu().float() / ranks
    return losses, sums


# Layers that reuse keys of earlier layers, have per-layer inputs, and have experts next to the MLP.
SHARING = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 24,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 61,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}


def check_ranks(model, folder, ranks, device):
    generator = torch.Generator().manual_seed(0)
    # Long positions: angles in bfloat16 would be off by up to 100 / 256.
    ids = torch.randint(0, 61, (2, 100), generator=generator)
    labels = ids.clone()
    labels[1, 60:] = -100  # the ranks have different numbers of labels
    batch = {"input_ids": ids, "labels": labels}
    num_items = int((labels[:, 1:] != -100).sum()) / ranks  # gradients are averaged over ranks
    task = {"config": model.config.to_dict(), "state": model.state_dict(), "batch": batch, "cases": CASES}
    torch.save(task | {"num_items": num_items}, folder / "task.pt")
    results = run_ranks(
        RANK, folder, device, ranks=ranks, backend="nccl" if device == "cuda" else "gloo", seconds=200
    )

    batch = {name: value.to(device) for name, value in batch.items()}
    model = model.to(device, torch.bfloat16)
    alone = {}
    for level in LEVELS:  # on a GPU, each level rounds in different places
        model.set_activation_memory(level)
        alone[level] = run_alone(model, batch, ranks, num_items)
    for (rank, result), case in itertools.product(enumerate(results), CASES):
        losses, gradients = alone[case[0]]
        assert result[case]["gradients"].keys() == gradients.keys()
        # The same operations on the same numbers. Only the order of the sum over ranks differs, and bf16
        # parameters round their gradient, by half of 2^-8.
        rtol = 1e-5 if case[1] == torch.float32 else 2**-8
        torch.testing.assert_close(result[case]["loss"], losses[rank], rtol=1e-6, atol=0)
        for name, expected in gradients.items():
            found = result[case]["gradients"][name].float()
            atol = rtol * expected.abs().max().item()
            torch.testing.assert_close(
                found, expected, rtol=rtol, atol=atol, msg=lambda m, n=name, c=case: f"{n} {c}: {m}"
            )


@pytest.mark.slow
def test_two_ranks_with_mixed_precision_equal_one_process_at_every_level(make_model, tmp_path):
    check_ranks(make_model(), tmp_path, 2, "cpu")


@pytest.mark.slow
def test_tensors_passed_between_layers_survive_two_ranks_at_every_level(make_model, tmp_path):
    check_ranks(make_model(**SHARING), tmp_path, 2, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hy_v4", "qwen4_exp_text", "gemma3n_text"])
def test_residual_streams_and_states_survive_two_ranks_at_every_level(family, tmp_path):
    """Streams that are mixed, gated or predicted, latents, chosen keys, n-grams and recurrent layers."""
    model = liger_models.from_config(find_architecture(family).tiny)
    check_ranks(randomise(model, torch.Generator().manual_seed(7)).train(), tmp_path, 2, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, SHARING], ids=["llama", "gemma4_text"])
def test_one_rank_on_a_gpu_equals_the_model_alone(changes, make_model, tmp_path):
    check_ranks(make_model(**changes), tmp_path, 1, "cuda")


def test_frameworks_find_nothing_to_cast_but_hidden_states(make_model):
    from torch.distributed.utils import _apply_to_tensors  # FSDP2 casts arguments with it

    model, found = make_model(), []

    def look(module, args, kwargs):
        _apply_to_tensors(lambda tensor: found.append(tensor.shape), (args, kwargs))

    for layer in model.layers:
        layer.register_forward_pre_hook(look, with_kwargs=True)
    model(torch.arange(12)[None], cu_seqlens=torch.tensor([0, 5, 12]))
    assert found == [(12, 32)] * 3  # the first layer has no residual


def test_layers_that_return_another_dtype_than_their_compute_dtype_are_refused(make_model):
    """FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, output_dtype=float32) makes such layers."""
    model = make_model().bfloat16()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: (*(_bfloat16(x) for x in args[:2]), args[2]))
        layer.register_forward_hook(lambda *call: tuple(None if x is None else x.float() for x in call[-1]))
    ids = torch.arange(12)[None]
    for labels in (ids, None):
        with pytest.raises(TypeError, match="leave output_dtype out of their MixedPrecisionPolicy, or give"):
            model(ids, labels=labels)


def _bfloat16(x):
    return None if x is None else x.bfloat16()
