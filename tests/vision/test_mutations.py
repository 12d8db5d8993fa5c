"""The parity comparison detects another value of any image-related field in the spec of a family."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
from mutations import is_noticed, unnoticed_fields

from liger_models.layers.specs import RopeSpec


@pytest.mark.of_layers
def test_another_value_of_any_field_is_detected(pair):
    assert not is_noticed(pair)
    skip = {field.removeprefix("field:") for field in pair.architecture.skip} | OF_OTHER_ROPES
    if getattr(pair.vision, "window", None) is None:
        skip |= {"VisionSpec.window", "VisionSpec.windowed"}
    if 2 not in pair.scenes.kinds(pair.batch()["input_ids"]):
        skip |= {"VisionSpec.video_id", "VisionSpec.clips"}  # no token has it
    if getattr(pair.vision, "spans", None) is None:
        skip |= {
            "AttentionSpec.whole_spans",
            "AttentionSpec.bidirectional_spans",
            "SharedAttentionSpec.bidirectional_spans",
        }
    if not any(rope.axes for block in pair.ours.spec.blocks for rope in block.ropes):
        skip |= {"VisionSpec.positions"}  # axes that nothing reads
    faults = list(unnoticed_fields(pair, of_images=True, skip=skip))
    if getattr(pair.vision, "positions", None) is None:  # then text positions have one axis
        faults = [fault for fault in faults if not re.match(r"blocks\..*\.(axes|frequencies|halves):", fault)]
    # Angles of a single layer matter little with few patches: they must be detected in some layer.
    layers = Counter(re.sub(r"^vision\.blocks\.\d+", "a layer", fault) for fault in faults)
    most = len(set(pair.vision.blocks)) - 1
    assert not [fault for fault, count in layers.items() if not fault.startswith("a layer") or count > most]


# Rotary settings that an encoder does not use.
OF_OTHER_ROPES = {
    f"RopeSpec.{field.name}"
    for field in dataclasses.fields(RopeSpec)
    if field.name not in ("dim", "theta", "type", "interleaved", "turning", "axes", "frequencies", "halves")
}
