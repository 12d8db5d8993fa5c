"""Ranks that share the experts train like one process, and read and write the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import liger_models
from liger_models import update_correction_bias
from liger_models.architectures import find_architecture
from liger_models.layers.experts.expert_parallel import divide_experts
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.specs import MLPSpec, MoESpec

RANK = Path(__file__).with_name("experts_rank.py")

# One family for each form of experts, on two ranks with half of the experts each, or on four ranks.
TWO = {"experts": 2}
CASES: dict[str, dict[str, Any]] = {
    "biases, clamped, sinks": {"family": "gpt_oss", "num_local_experts": 6, "dims": TWO},
    "a router's loss": {"family": "qwen3_moe", "output_router_logits": True, "dims": TWO},
    "shared expert, correction bias": {"family": "deepseek_v3", "dims": TWO},
    "weighted inputs": {"family": "llama4_text", "num_local_experts": 6, "dims": TWO},
    "with an MLP": {"family": "gemma4_text", "num_experts": 6, "dims": TWO},
    "plain experts in a latent space": {"family": "nemotron_h", "dims": TWO},
    "experts that no token chooses": {"family": "deepseek_v3", "n_group": 2, "topk_group": 1, "dims": TWO},
    "with sequences": {"family": "gpt_oss", "num_local_experts": 6, "dims": {**TWO, "sequence": 2}},
    **{
        f"level {level}": {"family": "gpt_oss", "num_local_experts": 6, "level": level, "dims": TWO}
        for level in LEVELS
        if level in ("all", "checkpoint", "offload")
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "divided further": {"family": "gpt_oss", "num_local_experts": 6, "intermediate_size": 40, "dims": TWO},
    "repeated": {"family": "deepseek_v3", "level": "mlp", "dims": {**TWO, "data_replicate": 2}},
    "with sequences": {"family": "qwen3_moe", "level": "checkpoint", "dims": {"experts": 4, "sequence": 2}},
}


def make(family: str, level: str, **changes: Any):
    """Make a model with random numbers in every parameter and buffer."""
    model = liger_models.from_config({**find_architecture(family).tiny, **changes}, activation_memory=level)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.3 * noise + ("norm" in name))
            if name.endswith("correction_bias") and changes.get("n_group") == 2:
                p[len(p) // 2 :] -= 10  # no token is routed to the second rank
    return model


def prepare(folder: Path, ranks: int, family: str, dims: dict[str, int], level: str = "lean", **changes: Any):
    """Write a checkpoint; return the task of the ranks, and results of one process on all their batches."""
    model = make(family, level, **changes)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(2)
    batches = [
        {"input_ids": (ids := torch.randint(0, 131, (1, seq), generator=generator)), "labels": ids}
        for seq in [23, 2, 14, 1][: ranks // dims.get("sequence", 1)]
    ]
    if dims.get("sequence", 1) == 1:
        batches[0]["cu_seqlens"] = torch.tensor([0, 9, 23])
    num_items = sum(batch["labels"].numel() for batch in batches)  # any number would do
    losses = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        losses.append(loss.detach())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    update_correction_bias(model)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    alone = {"losses": losses, "biases": biases, "model": model}
    biases = {name: before[name] for name in biases}
    return {"batches": batches, "num_items": num_items, "dims": dims, "level": level, "biases": biases}, alone


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of each rank, results of one process, and the folder, by number of ranks and case that runs."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = {item.callspec.params.get("case") for item in here if "results" in item.fixturenames}
    found = {}
    for ranks, table in ((2, CASES), (4, FOUR)):
        cases = [name for name in table if name in chosen]
        folder = tmp_path_factory.mktemp("experts")
        tasks, alone = {}, {}
        for name in cases:
            case = table[name]
            tasks[name], alone[name] = prepare(folder / name, ranks, **case)
        torch.save(tasks, folder / "task.pt")
        of_ranks = run_ranks(RANK, folder, ranks=ranks)
        for name in cases:
            found[ranks, name] = [one[name] for one, _ in of_ranks], alone[name], folder / name
        found[ranks] = [layers for _, layers in of_ranks]
    return found


def check(found: list[dict[str, Any]], alone: dict[str, Any], folder: Path, sequence: int) -> None:
    model, data = alone["model"], len(found) // sequence
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
    for rank, result in enumerate(found):
        # Sums over experts and tokens run in other orders: a few roundings at the size of the largest
        # element.
        loss = alone["losses"][rank // sequence] * data
        torch.testing.assert_close(result["loss"], loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(result["norm"].double(), norm, rtol=1e-5, atol=0)
        assert torch.equal(result["norm before clipping"], result["norm"])
        factor = 0.5 * result["norm"] / (result["norm"] + 1e-6)
        for name, gradient in result["gradients"].items():  # three float32 roundings
            torch.testing.assert_close(result["clipped"][name], factor * gradient, rtol=4e-7, atol=0)
        for name, true in gradients.items():
            error, size = (result["gradients"][name] - true).abs().max().item(), true.abs().max().item()
            assert error <= 1e-5 * size, f"{name}: {error / size:.1e}"
        for name, true in alone["biases"].items():
            assert torch.equal(result["biases"][name], true)  # loads are integers
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {path.name: path.read_bytes() for path in (folder / "saved").iterdir()} == files


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_half_of_the_experts_equal_one_process(case, results):
    found, alone, folder = results[2, case]
    check(found, alone, folder, CASES[case]["dims"].get("sequence", 1))
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for result in found:
        assert result["read"] == result["held"]
        assert 0.4 * total < result["read"] < 0.6 * total


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_that_shard_or_replicate_the_experts_further_equal_one_process(case, results):
    found, alone, folder = results[4, case]
    check(found, alone, folder, FOUR[case]["dims"].get("sequence", 1))
    for result in found:
        # Shards of gpt-oss's alternating biases are cut from whole ones, which both of two ranks read.
        assert result["read"] == result["held"] + (case == "divided further") * result["alternating"]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_tokens_compute_tokens_of_other_ranks(ranks, results):
    for rank, forms in enumerate(results[ranks]):
        for form, values in forms.items():
            assert ("y" in values) == (rank == ranks - 1)
            for name, (value, true) in values.items():
                # Sums of up to 20 terms in two float32 products.
                error, size = (value - true).abs().max().item(), true.abs().max().item()
                assert error <= 1e-5 * size, f"{form} {name}: {error / size:.1e}"


@pytest.mark.parametrize(
    ("family", "ranks", "match"),
    [("llama", 2, "no layer of this model has experts"), ("gpt_oss", 2, r"layers\.0\.mlp\.experts has 5")],
)
def test_the_error_names_experts_that_ranks_cannot_share(family, ranks, match):
    mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: 0)
    with pytest.raises(ValueError, match=match):
        divide_experts(liger_models.from_config(find_architecture(family).tiny), mesh)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_divided_experts_run_eagerly_in_a_compiled_layer():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = MixtureOfExperts(16, MoESpec(4, 2, 8, shared_expert=MLPSpec(8)))
        divide_experts(layer, init_device_mesh("cpu", (1,)))
        x = torch.randn(5, 16)
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    finally:
        torch.distributed.destroy_process_group()
