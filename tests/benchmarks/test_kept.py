"""Models in random quantised bits have the shapes of published ones, and are trained next to their plan."""

from __future__ import annotations

import csv
import math

import pytest
import torch

pytest.importorskip("peft")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b-6"])
def test_bits_take_half_a_byte_and_their_scales(benchmarks, name):
    from benchmarks.random_bits import skeleton
    from benchmarks.training.shapes import MODELS
    from liger_models.layers.projections.stored_weight import kept_weights

    model = skeleton(MODELS[name])
    stored = [m for m in model.modules() if kept_weights(m)]
    assert len(stored) == len(model.layers)
    elements = sum(math.prod(kept.shape) for m in stored for kept in kept_weights(m).values())
    held = sum(p.nbytes for m in stored for p in m.parameters() if p.dtype == torch.uint8)
    per_element = {"gpt-oss-20b": 17 / 32, "qwen3-30b-a3b-6": 1 / 2 + 1 / 64}[name]
    assert held == pytest.approx(per_element * elements, rel=2e-3)


def test_a_model_in_random_bits_is_trained_and_planned(benchmarks, tmp_path):
    arguments = ["kept", "--model", "tiny-gpt-oss", "--parts", "fits", "--experts", "--rank", "2"]
    arguments += [
        "--seq",
        "16",
        "--steps",
        "1",
        "--levels",
        "lean",
        "--bases",
        "bits",
        "dense",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert benchmarks.__main__.main(arguments) == 0
    with (tmp_path / "kept-tiny-gpt-oss.csv").open() as file:
        _, in_bits, _, dense = csv.DictReader(file)
    assert [in_bits["what"], dense["what"]] == ["a step of 16, lean, bits", "a step of 16, lean, dense"]
    for step in (in_bits, dense):
        assert step["note"].startswith("plan 0.0")
        assert 6 < float(step["note"].rpartition(" ")[2]) < 8  # log(1024) of random weights is 6.9
