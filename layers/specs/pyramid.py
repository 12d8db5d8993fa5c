"""An encoder of images by convolutions, at several resolutions (MobileNetV5, after MobileNetV4,
arXiv:2404.10518): layers/grids/pyramid.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EdgeBlockSpec:
    """A convolution of `kernel` times `kernel` pixels with a `stride`, to `expansion` times as many channels
    as its input has, and one of single pixels to `channels`.
    """

    channels: int
    expansion: int
    stride: int = 1
    kernel: int = 3


@dataclass(frozen=True)
class InvertedBlockSpec:
    """Pointwise convolutions to `expansion` times as many channels and to `channels`; before them and
    between them a depthwise one, of `start` and of `middle` pixels on a side, 0 for none. The latter has
    the `stride`.
    """

    channels: int
    expansion: int
    start: int = 0
    middle: int = 0
    stride: int = 1


@dataclass(frozen=True)
class QueryBlockSpec:
    """Attention of all pixels to one another in `num_attention_heads` heads of `head_dim`, which share keys
    and values. With a `stride` these are made of fewer pixels, by depthwise convolutions of `kernel` times
    `kernel` pixels.
    """

    num_attention_heads: int
    head_dim: int
    stride: int = 1
    kernel: int = 3


PyramidBlockSpec = EdgeBlockSpec | InvertedBlockSpec | QueryBlockSpec


@dataclass(frozen=True)
class PyramidSpec:
    """A convolution of 3 times 3 pixels with stride 2 to `stem` channels, `stages` of blocks, and the fusion
    of the outputs of the last two at the higher resolution, by two convolutions of single pixels, with
    `expansion` times as many channels between them. Means over pixels make as many features as there are
    patches, which are multiplied by `scale`. `eps` is of all norms.
    """

    stem: int
    stages: tuple[tuple[PyramidBlockSpec, ...], ...]
    scale: float
    expansion: int = 2
    eps: float = 1e-6
