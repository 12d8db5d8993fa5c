"""Mistral Large 4's language model, which loads only together with its encoder."""

from __future__ import annotations

import pytest
from mutations import unnoticed_fields

import liger_models
from liger_models.architectures import find_architecture
from liger_models.convert.errors import ConfigError


def test_another_value_of_any_field_of_its_text_part_is_noticed(make_pair):
    missed = unnoticed_fields(make_pair("mistral_large4"))
    assert set(missed.values()) <= {"RopeSpec.short_factor", "RopeSpec.long_factor"}  # not of YaRN


WRONG = {
    "without positions, of a layer with them": ([1, 0, 1, 0, 1], [0, 1, 0, 0, 4]),
    "with positions, of a layer without them": ([1, 0, 1, 0, 1], [0, 1, 1, 3, 4]),
    "not of the last layer that shares": ([1, 1, 1, 1, 1], [0, 1, 1, 0, 4]),
    "of a layer without latents": ([1, 0, 1, 0, 1], [0, 1, 0, 1, 2]),
    "of a later layer": ([1, 1, 1, 1, 1], [2, 1, 2, 3, 4]),
    "too few": ([1, 1, 1, 1, 1], [0, 1]),
}


@pytest.mark.parametrize(("turning", "sources"), WRONG.values(), ids=WRONG)
def test_latents_that_the_reference_would_not_read_are_refused(turning, sources):
    tiny = find_architecture("mistral_large4").tiny
    text = {**tiny["text_config"], "no_rope_layers": turning, "kv_source_layers": sources}
    with pytest.raises(ConfigError, match="kv_source_layers must have for each of 5 layers its own index"):
        liger_models.from_config({**tiny, "text_config": text}, device="meta")
