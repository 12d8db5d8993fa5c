"""float8 under FSDP2 on two processes computes what one process computes."""

from pathlib import Path

import pytest
import torch
from float8_rank import make_model
from ranks import run_ranks
from test_float8 import CONFIG

RANK = Path(__file__).parent / "float8_rank.py"


@pytest.mark.parametrize(
    ("recipe", "level", "stored"),
    [
        ("rowwise", "lean", "float32"),
        ("rowwise", "checkpoint", "bfloat16"),
        ("tensorwise", "lean", "bfloat16"),
    ],
)
def test_gradients_are_those_of_one_process(recipe, level, stored, tmp_path):
    ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    torch.save({"config": CONFIG, "ids": ids}, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path, recipe, level, stored)
    # Weights gathered in bfloat16 are those of a model that was rounded to it.
    model = make_model(CONFIG, recipe, level, getattr(torch, stored)).bfloat16()
    halves = []
    for rank, own in zip(found, ids.chunk(2), strict=True):
        model.zero_grad()
        loss = model(own, labels=own).loss
        loss.backward()
        assert torch.equal(rank["loss"], loss)
        halves.append({name: p.grad.float() for name, p in model.named_parameters()})
    for name, gradient in found[0]["gradients"].items():
        mean = (halves[0][name] + halves[1][name]) / 2
        torch.testing.assert_close(gradient.float(), mean, rtol=2**-8, atol=2**-8 * float(mean.abs().max()))
        assert torch.equal(gradient, found[1]["gradients"][name])
