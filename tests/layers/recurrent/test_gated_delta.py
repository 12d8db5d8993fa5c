"""The mixer with the kernels, in Triton's interpreter, against the plain twins."""

from __future__ import annotations

import pytest
import torch
from mixer_runs import results

from liger_models.kernels._dispatch import interpret
from liger_models.layers.recurrent.gated_delta import GatedDelta
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GatedDeltaSpec

HIDDEN = 24


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_states_pass_from_chunk_to_chunk_and_on_from_a_given_state(randomised):
    """Three chunks, whose decays leave half of a state after each, so that all of them count."""
    mixer = randomised(GatedDelta(HIDDEN, GatedDeltaSpec(1, 1, 16, 16)))
    torch.nn.init.constant_(
        mixer.A_log, -4.3
    )  # softplus(a) is 0.8 on average: exp(-64 * 0.8 * exp(-4.3)) = 0.5
    parts = [torch.randn(130, 1, 16).requires_grad_() for _ in range(3)]
    gates = [torch.randn(130, 1).requires_grad_() for _ in range(2)]
    state = torch.randn(1, *mixer.state_shape).requires_grad_()
    upstream = torch.randn(130, 1, 16), torch.randn_like(state)
    leaves = [*parts, *gates, mixer.A_log, mixer.dt_bias, state]

    def scan():
        outputs = mixer.scan(parts, gates, None, state)
        return *outputs, *torch.autograd.grad(outputs, leaves, upstream)

    expected = scan()
    with interpret():
        found = scan()
    o, final, dq, dk, dv, da, db, dA_log, ddt_bias, dstate = zip(found, expected, strict=True)
    for ours, true in (o, final, dq, dk, dv, da, db, dstate):
        assert (ours - true).norm() <= 1e-5 * true.norm()  # float32 in chunks against token by token
    for ours, true in (dA_log, ddt_bias):  # sums over tokens that nearly cancel, of terms of da's size
        assert (ours - true).norm() <= 1e-5 * da[1].norm()
