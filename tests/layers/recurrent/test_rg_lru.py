"""The recurrent block of Griffin with the kernels, in Triton's interpreter, against the plain twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mixer_runs import results

from liger_models.kernels._dispatch import interpret
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.recurrent.rg_lru import RGLRU
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import RGLRUSpec

HIDDEN = 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_kernels_match_the_plain_twins(randomised):
    """For a document of two pieces, and one of one token."""
    mixer = randomised(RGLRU(HIDDEN, RGLRUSpec(1, 6, 2)))
    sequences = Sequences.of_lengths([34, 1], torch.device("cpu"))
    x, dy = torch.randn(2, 35, HIDDEN)
    expected = results(mixer, x, dy, sequences, "all")
    with interpret():
        found = results(mixer, x, dy, sequences, "lean")
    for name, value in expected.items():
        # float32, with sums in other orders
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_rows_whose_first_part_is_empty_begin_with_their_first_token(randomised):
    """As in a prompt that is filled in parts, of a row with much padding before it."""
    mixer = randomised(RGLRU(HIDDEN, RGLRUSpec(2, 3)))
    x = torch.randn(9, HIDDEN)
    whole, sequences = mixer(x, Sequences.of_lengths([5, 4], torch.device("cpu"))), torch.tensor([0, 5, 5])
    channels = mixer.in_proj(x)[:, 6:]
    first, states = mixer._with_states(channels[:5], (), sequences, None, None)
    second, _ = mixer._with_states(channels[5:], (), torch.tensor([0, 0, 4]), None, states)
    h = torch.cat([first, second]).flatten(1)
    found = mixer.out_proj(F.gelu(mixer.in_proj(x)[:, :6], approximate="tanh") * h)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


def test_weight_decay_acts_on_projections_alone():
    mixer = RGLRU(HIDDEN, RGLRUSpec(2, 3))
    decayed = {id(p) for *_, p in matrices(mixer)}
    found = {name for name, p in mixer.named_parameters() if id(p) in decayed}
    gates = {"input_gate_weight", "recurrent_gate_weight"}
    assert found == {"in_proj.weight", "out_proj.weight", *gates}


def test_fresh_decays_are_between_their_bounds():
    mixer = RGLRU(HIDDEN, RGLRUSpec(10, 50))
    decay = torch.exp(-F.softplus(mixer.recurrent_param.detach().double()))  # an open gate takes its power
    assert decay.min() >= 0.9 * (1 - 1e-5)
    assert decay.max() <= 0.999 * (1 + 1e-5)
    assert 0.4 < (decay.square() < (0.9**2 + 0.999**2) / 2).double().mean() < 0.6  # uniform in their squares
