"""The parity comparison detects another value of any image-related field in the spec of a family."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import pytest
from mutations import OF_IMAGES, form_at, is_noticed, spec_fields, unnoticed_fields
from pairs import spec_of
from representatives import vision_representatives

from liger_models.architectures import find_architecture
from liger_models.layers.specs import GridPictures, RopeSpec


@pytest.mark.of_layers("tokens")
def test_another_value_of_any_field_is_detected(family, pair, request):
    """Fields that an earlier family has in the same form, at the same place, are left to that one."""
    assert not is_noticed(pair)
    all_families = request.config.getoption("--all-families")
    by_others = frozenset() if all_families else forms_of_earlier(family)
    skip = {field.removeprefix("field:") for field in pair.architecture.skip} | OF_OTHER_ROPES
    if getattr(pair.vision, "window", None) is None:
        skip |= {"VisionSpec.window", "VisionSpec.windowed"}
    if not getattr(pair.vision, "marker_ids", None):
        skip |= {"VisionSpec.marker_ids"}  # the projector has no rows for them
    if getattr(pair.vision, "framing_ids", None) is None:
        skip |= {"VisionSpec.framing_ids"}  # there is no other value to try
    if getattr(pair.vision, "audio_id", None) is None:
        skip |= {"VisionSpec.audio_id"}  # no token is a sound's
    if not pair.vision.blocks:
        skip |= {"VisionSpec.blocks"}
    if 2 not in pair.scenes.kinds(pair.batch()["input_ids"]):
        skip |= {"VisionSpec.video_id", "VisionSpec.clips", "AnyresPictures.frame_pool"}  # no token has it
        skip |= {"VisionSpec.joined_steps"}  # an image has one
    if not isinstance(getattr(pair.vision, "pictures", None), GridPictures):
        skip |= {"VisionSpec.joined_steps"}
    if getattr(pair.vision, "spans", None) is None:
        skip |= {
            "AttentionSpec.whole_spans",
            "AttentionSpec.bidirectional_spans",
            "SharedAttentionSpec.bidirectional_spans",
        }
    if not any(rope.axes for block in pair.ours.spec.blocks for rope in block.ropes):
        skip |= {"VisionSpec.positions"}  # axes that nothing reads
    faults = list(unnoticed_fields(pair, of_images=True, skip=skip, by_others=by_others))
    if getattr(pair.vision, "positions", None) is None:  # then text positions have one axis
        faults = [
            fault
            for fault in faults
            if not re.match(r"(.*query_encoder\.)?blocks\..*\.(axes|frequencies|halves):", fault)
        ]
    # Angles of a single layer matter little with few patches: they must be detected in some layer.
    layers = Counter(re.sub(r"^vision\.blocks\.\d+", "a layer", fault) for fault in faults)
    most = len(set(pair.vision.blocks)) - 1
    assert not [fault for fault, count in layers.items() if not fault.startswith("a layer") or count > most]


def forms_of_earlier(family):
    """The forms of the fields of earlier families' encoders, except of those that depend on the images."""
    names = vision_representatives("tokens")
    return frozenset().union(*(forms_of(name) for name in names[: names.index(family)]))


@functools.cache
def forms_of(family):
    spec, skip = spec_of(family), find_architecture(family).skip
    return {
        form_at(spec, path)
        for path, field, *_ in spec_fields(spec)
        if path[0] == "vision" and f"field:{field}" not in skip and not field.startswith("VisionSpec.")
    } - {form_at(spec, path) for path, field, *_ in spec_fields(spec) if field in OF_IMAGES}


# Rotary settings that an encoder does not use.
OF_OTHER_ROPES = {
    f"RopeSpec.{field.name}"
    for field in dataclasses.fields(RopeSpec)
    if field.name not in ("dim", "theta", "type", "interleaved", "turning", "axes", "frequencies", "halves")
}
