"""Mamba's prompts in parts and with padding, and configs that are refused."""

from __future__ import annotations

import pytest
import torch
from pairs import BOUND, relative_distance, spec_of

from liger_models.convert.errors import ConfigError


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_padding_on_the_left_changes_nothing_even_with_a_bias(family, bias, make_pair):
    """In the reference the bias of padding enters the convolution of the first tokens."""
    model = make_pair(family, {"use_bias": bias}).ours
    ids = torch.arange(3, 14)[None]
    padded, mask = torch.cat([ids.new_zeros(1, 4), ids], 1), torch.ones(1, 15, dtype=torch.long)
    mask[:, :4] = 0
    with torch.no_grad():
        alone = model(ids, return_logits=True).logits
        found = model(padded, attention_mask=mask, return_logits=True).logits[:, 4:]
    assert relative_distance(found, alone) <= BOUND


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mamba", {"state_size": 300}, "state_size is 300; expected at most 256"),
        ("mamba", {"conv_kernel": 9}, "conv_kernel is 9; expected 2 to 8"),
        ("mamba", {"hidden_act": "gelu"}, "the convolutions of state space layers have only 'silu'"),
        ("mamba", {"time_step_rank": "half"}, "time_step_rank"),
        (
            "jamba",
            {"attn_layer_offset": 3},
            "attn_layer_offset is 3; expected less than attn_layer_period, 3",
        ),
        ("jamba", {"expert_layer_period": 0}, "expert_layer_period"),
    ],
)
def test_configs_that_cannot_be_right_are_refused(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(family, changes)


def test_a_given_intermediate_size_goes_before_the_expansion():
    """Falcon-Mamba 7B has both, 8192 and 16 times 4096, and means the first."""
    mixer = spec_of("falcon_mamba", {"intermediate_size": 72, "expand": 16}).blocks[0].mixer
    assert mixer.channels == 72
