"""Mamba 2's residual stream in float32, and time steps with bounds."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from pairs import relative_distance, spec_of

from liger_models.convert.errors import ConfigError
from liger_models.layers.projections.matrices import matrices


def stream(model, norm, ids):
    """The sum that the last norm reads."""
    sums = []
    handle = norm.register_forward_pre_hook(lambda _, terms: sums.append(sum(x.double() for x in terms)))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return sums[0].flatten(0, -2)


@pytest.mark.parametrize("wide", [True, False])
def test_the_residual_stream_is_in_float32_if_the_config_says_so(wide, make_pair):
    """Only branches are rounded then, and these are small here."""
    pair = make_pair("mamba2", {"residual_in_fp32": wide, "num_hidden_layers": 6})
    ours, reference = pair.ours.bfloat16(), pair.reference.bfloat16()
    with torch.no_grad():
        for model in (ours, reference):
            for name, parameter in model.named_parameters():
                if name.endswith("out_proj.weight"):
                    parameter.mul_(2.0**-8)
    ids = pair.batch()["input_ids"]
    exact = copy.deepcopy(ours).double()
    truth = stream(exact, exact.norm, ids)
    found = stream(ours, ours.norm, ids), stream(reference, reference.backbone.norm_f, ids)
    errors = [relative_distance(x, truth) for x in found]
    # Six sums rounded to bfloat16, by up to 2^-9 each; or six branches of about 2^-6 of the stream, each
    # rounded a few times.
    assert all(error < 2.0**-10 if wide else error > 2.0**-9 for error in errors)


@pytest.mark.parametrize("level", ["checkpoint", "offload"])
def test_the_stream_stays_in_float32_when_layers_run_again(level, make_pair):
    pair = make_pair("mamba2", {"num_hidden_layers": 3})
    batch, model = pair.batch(), pair.ours.bfloat16()
    runs = []
    for chosen in ("all", level):
        model.set_activation_memory(chosen)
        model.zero_grad()
        model(**batch).loss.backward()
        runs.append([parameter.grad.clone() for parameter in model.parameters()])
    for once, again in zip(*runs, strict=True):
        torch.testing.assert_close(again, once, rtol=0, atol=0)


def test_weight_decay_acts_on_projections_alone(shared_pair):
    decayed = {id(p) for *_, p in matrices(shared_pair("mamba2").ours.layers[0])}
    named = shared_pair("mamba2").ours.layers[0].named_parameters()
    expected = {"mamba.in_proj.weight", "mamba.out_proj.weight"}
    assert {name for name, p in named if id(p) in decayed} == expected


@pytest.mark.parametrize("infinity", [math.inf, "Infinity", {"__float__": "Infinity"}])
def test_an_infinite_limit_has_several_spellings(infinity):
    config = json.loads(json.dumps({"time_step_limit": [0.25, infinity]}))
    mixer = spec_of("mamba2", config).blocks[0].mixer
    assert mixer.dt_limit == (0.25, None)


@pytest.mark.parametrize("limit", [[0.1], [0.2, 0.1], [0.0, "x"], [math.inf, math.inf], 0.1, [math.nan, 1.0]])
def test_invalid_limits_are_refused(limit):
    with pytest.raises(ConfigError, match="time_step_limit must be two numbers in ascending order"):
        spec_of("mamba2", {"time_step_limit": limit})
