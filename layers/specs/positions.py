"""Positions of image tokens in the language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TimeSpec:
    """Positions of image tokens on three axes, time, row and column (M-RoPE, arXiv:2409.12191, section 2.1):
    see layers/vision/positions.py. A second of video is `tokens_per_second` positions long; None: one
    position per time step. `steps_apart`: text separates the time steps of a video, so that each is an image
    of its own (Qwen3-VL).
    """

    tokens_per_second: float | None = None
    steps_apart: bool = False
    past_time: ClassVar[bool] = False
    seconds: ClassVar[str] = "second_per_grid_ts"


@dataclass(frozen=True)
class ClockSpec(TimeSpec):
    """The same in a model that also hears, whose audio tokens have positions like text (TMRoPE,
    arXiv:2503.20215, section 2.2). The token after a picture is after its last time, too; the keyword
    `seconds`, with the duration of a time step, must come with videos. Times that are no whole positions are
    rounded down, or refused if `whole`.

    The tokens of a video and of its own sound alternate, after the two tokens `start_ids`. Both begin at the
    same position. If `shared_frame`, these two tokens have one position, and so have the two after the video.
    """

    start_ids: tuple[int, int] = (-1, -1)
    shared_frame: bool = False
    whole: bool = False
    past_time: ClassVar[bool] = True
    seconds: ClassVar[str] = "video_second_per_grid"


@dataclass(frozen=True)
class CanvasSpec:
    """Positions of image tokens on three axes, time, row and column, where the slices of an image lie on one
    canvas (MiniCPM-V 4.7): see layers/vision/canvas.py. Tokens before and after an image have the ids
    `image_ids`, those before and after a slice `slice_ids`, and the one that ends a row of slices has
    `newline_id`.
    """

    image_ids: tuple[int, int]
    slice_ids: tuple[int, int]
    newline_id: int
    tokens_per_second: ClassVar[None] = None  # each frame of a video is an image
    steps_apart: ClassVar[bool] = False


@dataclass(frozen=True)
class PlaceSpec:
    """Positions of image tokens on four axes: the count of tokens, and in an image column, row and the number
    of the image in its document; the first and the last token of an image, as text, have the count on all
    of them (Hunyuan-VL).
    """

    tokens_per_second: ClassVar[None] = None  # of videos, which there are not
    steps_apart: ClassVar[bool] = False
