"""The mixer of Mamba with the kernels, in Triton's interpreter, against the plain twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mixer_runs import results

from liger_models.kernels._dispatch import interpret
from liger_models.layers.projections.matrices import matrices
from liger_models.layers.recurrent.selective import SelectiveScan
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import SelectiveSpec

HIDDEN = 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("norms", "keeping"), [("weighted", "lean"), (None, "checkpoint")])
def test_kernels_match_the_plain_twins(norms, keeping, randomised):
    """For a document of two pieces, and one of one token."""
    mixer = randomised(SelectiveScan(HIDDEN, SelectiveSpec(6, 2, 2, norms=norms)))
    sequences = Sequences.of_lengths([34, 1], torch.device("cpu"))
    x, dy = torch.randn(2, 35, HIDDEN)
    expected = results(mixer, x, dy, sequences, "all")
    with interpret():
        found = results(mixer, x, dy, sequences, keeping)
    for name, value in expected.items():
        # float32, with sums in other orders
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


def test_the_bias_of_the_step_is_added_in_float32():
    """Steps of fresh weights are small, and their biases not: rounded with its bias, a step is off by 1%."""
    mixer = SelectiveScan(HIDDEN, SelectiveSpec(64, 3, 2)).bfloat16()
    with torch.no_grad():
        mixer.dt_proj.weight.mul_(0.01)
        mixer.A_log.fill_(-30.0)  # states add up
        mixer.D.zero_()
    x = torch.randn(50, HIDDEN, dtype=torch.bfloat16)
    sequences = Sequences.of_lengths([50], torch.device("cpu"))
    with torch.no_grad():
        inner = mixer.in_proj(x).chunk(2, dim=-1)[0]
        (part,) = mixer.conv1d(inner, None, None)
        dt, b, c = mixer._selected(part.squeeze(-1))
        found = mixer.mix(inner, (), sequences).squeeze(-1).double()
        step = F.softplus(dt.double() + mixer.dt_bias.double())
        written = (step * part.squeeze(-1).double())[..., None] * b.double()[:, None]
        true = (written.cumsum(0) * c.double()[:, None]).sum(-1)
    # The output is rounded once to bfloat16.
    assert (found - true).norm() <= 2**-8 * true.norm()


def test_weight_decay_acts_on_projections_alone():
    mixer = SelectiveScan(HIDDEN, SelectiveSpec(6, 3, 2, norms="weighted"))
    decayed = {id(p) for *_, p in matrices(mixer)}
    found = {name for name, p in mixer.named_parameters() if id(p) in decayed}
    assert found == {f"{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")}


def test_fresh_steps_are_between_their_bounds_and_rates_count_up():
    mixer = SelectiveScan(HIDDEN, SelectiveSpec(500, 4, 2))
    step = F.softplus(mixer.dt_bias.detach().double())
    assert step.min() >= 0.001 * (1 - 1e-4)
    assert step.max() <= 0.1 * (1 + 1e-4)
    assert 0.25 < (step < 0.01).double().mean() < 0.75  # half of them, uniform in their logarithm
    torch.testing.assert_close(mixer.A_log.detach().exp(), torch.arange(1.0, 5.0).expand(500, 4))
