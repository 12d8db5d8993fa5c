"""Rotation of features of sound by the time since their recording began (Music Flamingo, arXiv:2511.10289,
after RoTE, arXiv:2410.12109), as the published model's code computes it.

    angle_i = -2 pi t * w / M * f_i,    of dimensions 2 i and 2 i + 1
    angle_i = -2 pi t * 2 pi p / M * f_i,    of as many dimensions after these

A recording is cut into clips of P features: w is the number of a feature's clip in its recording, p that of
the feature in its clip, and t = (w P + p) times the seconds of a feature. f_i = M^(-2 i / dim). Angles are in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._copies import to_device
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.specs import TimeRotarySpec


def turned(x: Tensor, windows: Tensor, counts: Sequence[int], most: int, spec: TimeRotarySpec) -> Tensor:
    """Rotate features.

    Args:
        x: of all clips, [sum of counts, D].
        windows: the number of each clip in its recording, [clips].
        counts: the number of features of each clip.
        most: that of a clip without padding, P.
    """
    lengths = torch.tensor(counts)
    before = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    frames = to_device(torch.arange(len(x)) - before, x.device)
    clips = windows.repeat_interleave(to_device(lengths, x.device), output_size=len(x))
    angles = angles_of(clips, frames, most, spec)
    rotary = 2 * angles.shape[1]
    pairs = at_least_float32(x[:, :rotary]).unflatten(1, (-1, 2))
    cos, sin = angles.cos()[..., None], angles.sin()[..., None]
    other = torch.stack((-pairs[..., 1], pairs[..., 0]), -1)
    return torch.cat([(pairs * cos + other * sin).flatten(1).to(x.dtype), x[:, rotary:]], 1)


def angles_of(windows: Tensor, frames: Tensor, most: int, spec: TimeRotarySpec) -> Tensor:
    """Angles of the pairs, [F, dim], from the numbers of clips and of features in these [F]. The order of
    products is the reference's: angles are large, and their rounding matters.
    """
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32, device=frames.device) / spec.dim
    frequencies = 1.0 / spec.theta**exponents
    begins = windows * most * (spec.step * 4)
    times = begins + frames.float() * (spec.step * 4)
    clips = (begins / (spec.step * 4 * most)).round() / spec.theta
    places = frames.float() / spec.theta * (2 * math.pi)
    both = torch.cat([clips[:, None] * frequencies, places[:, None] * frequencies], 1)
    return both * (-times * 2 * math.pi)[:, None]


def numbers_of_clips(is_audio: Tensor, counts: Sequence[int], documents: Documents) -> Tensor:
    """The number of each clip in its recording, [clips]: clips whose tokens follow one another in a document
    are of one recording. Does not wait for the device.

    Args:
        is_audio: mask of the audio tokens, [T].
        counts: the number of tokens of each clip.
        documents: of the tokens.
    """
    begins, bounds = is_audio & ~F.pad(is_audio, (1, 0))[:-1], documents.bounds()
    if bounds is not None:
        first = bounds[0] == torch.arange(len(is_audio), device=is_audio.device)
        begins = begins | (is_audio & first)
    lengths = torch.tensor(counts)
    firsts = to_device(lengths.cumsum(0) - lengths + 1, is_audio.device)
    place = torch.searchsorted(is_audio.cumsum(0), firsts).clamp(max=len(is_audio) - 1)
    recording = begins.cumsum(0)[place]
    return torch.arange(len(counts), device=is_audio.device) - torch.searchsorted(recording, recording)
