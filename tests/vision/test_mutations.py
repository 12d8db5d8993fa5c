"""The parity comparison notices another value of any field that concerns images in the spec of a family."""

from __future__ import annotations

import dataclasses

from mutations import is_noticed, unnoticed_fields

from liger_models.layers.spec import RopeSpec


def test_another_value_of_any_field_is_noticed(pair):
    assert not is_noticed(pair)
    skip = {field.removeprefix("field:") for field in pair.architecture.skip} | OF_OTHER_ROPES
    if pair.vision.window is None:
        skip |= {"VisionSpec.window", "VisionSpec.windowed"}
    missed = unnoticed_fields(pair, of_images=True)
    assert not {fault: field for fault, field in missed.items() if field not in skip}


# What the rotary settings of an encoder do not use.
OF_OTHER_ROPES = {
    f"RopeSpec.{field.name}"
    for field in dataclasses.fields(RopeSpec)
    if field.name not in ("dim", "theta", "type", "interleaved", "turning", "axes", "frequencies")
}
