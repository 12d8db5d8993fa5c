"""Weights that are clamped in training (Gemma 3n's), where FSDP2 computes with copies of sharded ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from randomised import randomise
from ranks import run_ranks

import liger_models
from liger_models.architectures import find_architecture

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without distributed"
)
RANK, RATE = Path(__file__).with_name("clamped_weights_rank.py"), 0.1
train = runpy.run_path(str(RANK))["train"]


@pytest.mark.slow
def test_shards_are_clamped_and_weights_gathered_with_the_whole_model_refused(tmp_path):
    """Two ranks train like one process, from weights beyond the limit."""
    model = liger_models.from_config(find_architecture("gemma3n_text").tiny | {"altup_coef_clip": 0.2})
    randomise(model, torch.Generator().manual_seed(7))
    coefficients = [p for name, p in model.named_parameters() if "prediction_coefs" in name]
    assert all((p.abs() > 0.2).any() for p in coefficients)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(3, 101, (4, 9), generator=torch.Generator().manual_seed(0))
    task = {"config": model.config.to_dict(), "state": state, "batch": ids, "rate": RATE}
    torch.save(task, tmp_path / "task.pt")
    found = run_ranks(RANK, tmp_path)

    # All rows have the same number of labels, so that the mean of the ranks' losses is that of all rows.
    *steps, weights = train(model, ids, RATE)
    for own in found:
        assert "prediction_coefs has the magnitude" in own["model"]
        assert "shard each layer" in own["model"]
        for expected, step in zip([*steps, weights], own["layers"], strict=True):
            assert step.keys() == expected.keys()
            for name in expected.keys() - {"loss"}:
                # Float32 sums in two orders, over two steps: see BOUND in tests/rounding.py.
                distance = (step[name] - expected[name]).norm()
                assert distance <= 2e-5 * expected[name].norm().clamp(min=1e-2), name
    for expected, *losses in zip(steps, *(own["layers"] for own in found), strict=False):
        mean = torch.stack([loss["loss"] for loss in losses]).mean()
        torch.testing.assert_close(mean, expected["loss"], rtol=1e-5, atol=0)
