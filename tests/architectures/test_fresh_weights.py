"""Fresh weights are distributed as in the reference, so that training from scratch starts in the same way."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch
from pairs import copy_parameters, map_like, names_of, reference_class, reference_config, spec_of

from liger_models.architectures import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.model.causal_lm import CausalLM

OTHERWISE = {
    "jamba": ("*.mamba.dt_bias",),  # steps as in Mamba's paper; the reference forgets these biases
    "nemotron": ("*norm.weight",),  # one plus this weight scales a norm, and the reference starts with two
}
"""Parameters that start differently on purpose, by family."""
SIGMAS = 6  # allowed errors of a mean and of a standard deviation


def test_fresh_weights_have_the_means_and_deviations_of_the_reference(family):
    architecture = find_architecture(family)
    config, carried = architecture.tiny, architecture.carried(HFConfig.load(architecture.tiny))
    torch.manual_seed(0)
    ours, theirs = CausalLM(spec_of(family)), CausalLM(spec_of(family))
    ours.reset_parameters()
    reference = reference_class(architecture)(reference_config(architecture, config))
    names = {n for n in names_of(reference) if not any(fnmatchcase(n, pattern) for pattern in carried)}
    copy_parameters(map_like(architecture, theirs, names), theirs, reference.state_dict())
    expected = dict(theirs.named_parameters())
    for name, found in ours.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in OTHERWISE.get(family, ())):
            continue
        (mean, std), (other_mean, other_std) = (
            (x.mean().item(), x.std(correction=0).item()) for x in (found.detach(), expected[name].detach())
        )
        wide, count = max(std, other_std), found.numel()
        assert mean == pytest.approx(other_mean, abs=SIGMAS * wide * math.sqrt(2 / count) + 1e-6), name
        assert std == pytest.approx(other_std, abs=SIGMAS * wide / math.sqrt(count) + 1e-6), name
