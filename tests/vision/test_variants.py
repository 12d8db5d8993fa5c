"""Registered variants of multimodal families: other language models, projectors and sizes."""

from __future__ import annotations

import pytest
from pairs import beyond_bound

from liger_models.architectures import find_architecture, list_architectures

VARIANTS = [
    pytest.param(family, changes, id=f"{family}-{name}")
    for family in list_architectures(vision=True)
    for name, changes in find_architecture(family).variants.items()
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_variant_matches_its_reference(family, changes, make_pair):
    pair = make_pair(family, changes)
    call = pair.batch()
    assert not beyond_bound(pair.distances(**call))
