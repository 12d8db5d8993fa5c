"""The mixer with the kernels, in Triton's interpreter, against the plain twins."""

from __future__ import annotations

import pytest
import torch

from liger_models.kernels._dispatch import interpret
from liger_models.layers.recompute.activation_memory import keep_recipes, recompute
from liger_models.layers.recurrent.gated_delta import GatedDelta
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedDeltaSpec

HIDDEN = 24


def results(mixer, x, dy, sequences, keeping):
    mixer.zero_grad()
    x = x.detach().requires_grad_()
    if keeping == "checkpoint":
        y = recompute(mixer, x, sequences)
    elif keeping == "lean":
        with keep_recipes():
            y = mixer(x, sequences)
    else:
        y = mixer(x, sequences)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in mixer.named_parameters()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("projections", "keeping"),
    [("qkvz", "all"), ("apart", "lean"), ("qkv", "checkpoint")],
)
def test_kernels_match_the_plain_twins(projections, keeping, randomised):
    """For a document of two chunks, and one of one token; two key heads only where their parts alternate."""
    key_heads = 2 if projections == "qkvz" else 1
    mixer = randomised(
        GatedDelta(HIDDEN, GatedDeltaSpec(key_heads, 2 * key_heads, 16, 16, projections=projections))
    )
    sequences = Sequences.of_lengths([66, 1], torch.device("cpu"))
    x, dy = torch.randn(2, 67, HIDDEN)
    expected = results(mixer, x, dy, sequences, "all")
    with interpret():
        found = results(mixer, x, dy, sequences, keeping)
    for name, value in expected.items():
        # float32 in chunks against token by token; gradients of A_log and dt_bias sum over all tokens
        assert (found[name] - value).norm() <= 3e-5 * value.norm(), name
