"""Positions on several axes of text with pictures, for each kind of spec."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.sequences.documents import Documents
from liger_models.layers.specs import CanvasSpec, ClockSpec, PlaceSpec, TimeSpec
from liger_models.layers.vision.canvas import canvas_positions, end_on_canvases
from liger_models.layers.vision.pictures import Pictures
from liger_models.layers.vision.positions import (
    AxisPositions,
    axis_positions,
    end_of_positions,
    place_positions,
)


def axes_of(
    spec: TimeSpec | CanvasSpec | PlaceSpec,
    documents: Documents,
    kinds: Tensor,
    ids: Tensor,
    pictures: Pictures,
    merge: int,
    end: int,
) -> tuple[AxisPositions, int]:
    """Positions of tokens ids [T] of these kinds, and an upper bound, for tokens that end at `end`."""
    if isinstance(spec, CanvasSpec):
        axes = canvas_positions(documents, kinds, ids, pictures, merge, spec)
        return axes, end_on_canvases(end, pictures, merge)
    if isinstance(spec, PlaceSpec):
        return place_positions(documents, kinds, pictures, merge), end
    rate = spec.tokens_per_second
    pictures = pictures.steps_apart() if spec.steps_apart else pictures
    shared_frame = isinstance(spec, ClockSpec) and spec.shared_frame
    axes = axis_positions(documents, kinds, pictures, merge, rate, spec.past_time, shared_frame)
    return axes, end_of_positions(end, pictures, rate)
