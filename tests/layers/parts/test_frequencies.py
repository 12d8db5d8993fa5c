"""Learned factors of rotary frequencies."""

import pytest
import torch

from liger_models.layers.parts.frequencies import make_frequencies
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.specs import RopeSpec

LEARNED = RopeSpec(8, learned=True)


def test_frequencies_are_multiplied_by_exponentials():
    frequencies = make_frequencies([RopeSpec(4), LEARNED])
    frequencies.alpha.copy_(torch.tensor([0.0, 1.0, -2.0, 0.5]))
    cos, sin = rotary_tables(LEARNED, torch.tensor([3]), factors=frequencies())
    expected = 3 * 10_000 ** -(torch.arange(4) / 4) * torch.tensor([0.0, 1.0, -2.0, 0.5]).exp()
    torch.testing.assert_close(cos[0], expected.cos())
    torch.testing.assert_close(sin[0], expected.sin())


def test_they_stay_in_float32():
    """In bfloat16 angles of long documents would be wrong by whole turns."""
    frequencies = make_frequencies([LEARNED])
    frequencies.alpha.fill_(0.123456789)
    assert frequencies.bfloat16()().dtype == torch.float32
    assert frequencies.alpha[0] == torch.tensor(0.123456789)


def test_layers_share_them_or_are_refused():
    assert make_frequencies([RopeSpec(8)]) is None
    with pytest.raises(ValueError, match=r"learned rotary frequencies are one list"):
        make_frequencies([LEARNED, RopeSpec(6, learned=True)])
    with pytest.raises(ValueError, match="need these; found none"):
        rotary_tables(LEARNED, torch.tensor([3]))
