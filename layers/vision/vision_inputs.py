"""Vision inputs of a call: pictures, the kinds of tokens, and the check that both match.

The check is computed on the device and read late, so that the host does not wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.host_copy import HostCopy
from liger_models.layers.specs import ClockSpec, VisionSpec
from liger_models.layers.vision.pictures import Pictures
from liger_models.layers.vision.positions import IMAGE, SOUND, TEXT, VIDEO
from liger_models.layers.vision.processor_inputs import HIDDEN_IN_PART

FRAMED = "moe_mm_token_type_ids"
"""Keyword with the kinds of tokens that choose experts: tokens that frame a picture are of its kind."""

WRONG_KINDS, WRONG_RUNS, WRONG_FRAMED, PARTLY_HIDDEN, WRONG_START = range(1, 6)
"""Faults of a call, as they are copied to the host; `finish_check` explains them."""


class VisionInputs:
    """Vision inputs of a call: its pictures, if any, and the kinds of its tokens.

    Attributes:
        kinds: kind of each token, as processors number them; [batch, seq] as given, later [T].
        framed: the same with the tokens that frame pictures, as given.
        deep: features added after the first layers of the language model, [F, H] each, in order.
        markers: number of each token in `VisionSpec.marker_ids`, [T], -1 for others; None: there are none.
        checks: counts of picture tokens, and faults, on their way to the host.
        wrong: pictures and tokens do not match, a bool on the device.
    """

    def __init__(self, pictures: Pictures | None, kinds: Tensor | None, framed: Tensor | None = None):
        self.pictures, self.kinds, self.framed = pictures, kinds, framed
        self.deep: list[Tensor] = []
        self.markers: Tensor | None = None
        self.checks: HostCopy | None = None
        self.wrong: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def expected(self, merge: int) -> tuple[int, int]:
        """The number of tokens that images and videos need."""
        return (0, 0) if self.pictures is None else self.pictures.features(merge)

    def places(self, merge: int) -> tuple[Tensor, Tensor]:
        """Mask of the tokens with features, [T, 1] bool, and the feature index of each token, [T]."""
        if self._places is None:
            assert self.pictures is not None
            assert self.kinds is not None
            count = sum(self.pictures.features(merge))
            is_image, is_video = self.kinds == IMAGE, self.kinds == VIDEO
            images = self.pictures.features(merge)[0]
            number = torch.where(is_image, is_image.cumsum(0), images + is_video.cumsum(0)) - 1
            seen, number = is_image | is_video, number.clamp(0, count - 1)
            if self.pictures.shown is not None:  # the features of those with tokens, in their order
                each = count // len(self.pictures.grids)
                order = (self.pictures.shown == 0).to(torch.uint8).argsort(stable=True)
                number = order[number // each] * each + number % each
            if self.markers is not None:  # their features follow the pictures'
                marked = self.markers >= 0
                seen, number = seen | marked, torch.where(marked, count + self.markers, number)
            self._places = seen[:, None], number
        return self._places

    def start_check(self, merge: int, faults: list[Tensor]) -> None:
        """Start to count the tokens of images and videos, and copy the counts and faults to the host.

        Requires `kinds` [T].
        """
        assert self.kinds is not None
        counts = [(self.kinds == IMAGE).sum(), (self.kinds == VIDEO).sum(), *faults]
        images: Any
        images, videos = self.expected(merge)
        shown, hidden = None if self.pictures is None else self.pictures.shown, None
        if shown is not None:
            hidden = (shown == 0).sum()
            images = images - hidden * (images // len(shown))
            counts.append(PARTLY_HIDDEN * (shown == 2).any())
        counted = torch.stack(counts)
        self.wrong = (counted[0] != images) | (counted[1] != videos) | counted[2:].any()
        if hidden is not None:
            counted = torch.cat([counted, hidden[None]])
        self.checks = HostCopy(counted)

    def finish_check(self, spec: VisionSpec, merge: int) -> bool | None:
        """Wait for the check, and return whether no images fill up rows; None if they cannot.

        Raises:
            DataError: pictures and tokens do not match.
        """
        if self.checks is None:
            return None
        images, videos, *faults = self.checks.tolist()
        expected, all_shown = self.expected(merge), None
        if self.pictures is not None and self.pictures.shown is not None:
            hidden, count = faults.pop(), len(self.pictures.shown)
            all_shown = hidden == 0
            expected = expected[0] - hidden * (expected[0] // count), expected[1]
        if PARTLY_HIDDEN in faults:
            raise DataError(HIDDEN_IN_PART)
        if (images, videos) != expected:
            raise DataError(
                f"the text has {images} tokens of images and {videos} of videos, and the pixels make "
                f"{expected[0]} and {expected[1]}; was the text cut, or an image left out?"
            )
        if WRONG_KINDS in faults:
            raise DataError(f"{spec.kinds} must be {meaning_of_kinds(spec)}")
        if WRONG_FRAMED in faults:
            raise DataError(
                f"{FRAMED} must be {meaning_of_kinds(spec)}, but as for pictures where input_ids are the "
                f"tokens before or after one, {spec.framing_ids}"
            )
        if WRONG_START in faults and isinstance(spec.positions, ClockSpec):
            raise DataError(
                "tokens of a video and of a sound alternate, but not after the tokens that begin a video and "
                f"a sound, {spec.positions.start_ids}: was the text changed after the processor made it?"
            )
        if WRONG_RUNS in faults:
            raise DataError(
                "the runs of image tokens in the text do not match the grids, which need one run of the same "
                "length for each picture: are the images in the order of the text, with text between them?"
            )
        return all_shown


def kinds_of(spec: VisionSpec, ids: Tensor) -> Tensor:
    """The kinds of tokens ids [T], int64: TEXT, IMAGE or VIDEO."""
    kinds = torch.where(ids == spec.image_id, IMAGE, TEXT)
    return kinds if spec.video_id is None else torch.where(ids == spec.video_id, VIDEO, kinds)


def with_sounds(spec: VisionSpec, ids: Tensor, kinds: Tensor) -> Tensor:
    """kinds [T] of tokens ids [T], with SOUND for tokens of sounds."""
    return kinds if spec.audio_id is None else torch.where(ids == spec.audio_id, SOUND, kinds)


def framed_kinds(spec: VisionSpec, ids: Tensor, kinds: Tensor) -> Tensor:
    """kinds [T] of tokens ids [T], in which tokens that frame a picture have its kind."""
    for number, framing in enumerate(spec.framing_ids or ()):
        kinds = torch.where(ids == framing, IMAGE if number < 2 else VIDEO, kinds)
    return kinds


def markers_of(spec: VisionSpec, ids: Tensor) -> Tensor:
    """The number of each token ids [T] in `spec.marker_ids`; -1 for others."""
    markers = torch.full_like(ids, -1)
    for number, marker in enumerate(spec.marker_ids):
        markers = torch.where(ids == marker, number, markers)
    return markers


def wrong_marks(given: Tensor, kinds: Tensor, with_images: bool) -> Tensor:
    """Whether the marks given [T] of tokens that attend to one another are wrong, a bool on the device."""
    if not with_images:
        return (given != 0).any()
    return ((given < 0) | (given > 1) | ((kinds == IMAGE) & (given != 1))).any()


def check_shapes(spec: VisionSpec, inputs: VisionInputs, input_ids: Tensor) -> None:
    """Check that the kinds given are one per token of input_ids [batch, seq].

    Raises:
        DataError: they have another shape.
    """
    for name, given in ((spec.kinds, inputs.kinds), (FRAMED, inputs.framed)):
        if given is not None and given.shape != input_ids.shape:
            raise DataError(
                f"{name} must have the shape of the tokens, {tuple(input_ids.shape)}; found "
                f"{tuple(given.shape)}"
            )


def meaning_of_kinds(spec: VisionSpec) -> str:
    """Description of the token kinds that `spec` expects, for errors."""
    if spec.spans == "prefix":
        return "0 for a document's prefix, whose tokens all attend to one another, 1 for the tokens to learn"
    if spec.spans == "marked":
        return (
            f"1 for the tokens of images, {spec.image_id}, and for those that frame them, 0 "
            "elsewhere, and 0 everywhere without images"
        )
    videos = "" if spec.video_id is None else f", 2 where they are {spec.video_id} (videos)"
    sounds = "" if spec.audio_id is None else f", 3 where they are {spec.audio_id} (sounds)"
    return f"1 where input_ids are {spec.image_id} (images){videos}{sounds}, and 0 elsewhere"
