"""Learned tables of patches' positions: see layers/vision/position_table.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StretchedTable:
    """A table of `side` times `side` positions, interpolated to the size of each image (Qwen3-VL)."""

    side: int


@dataclass(frozen=True)
class AntialiasedTable:
    """A table of `side` times `side` positions, interpolated bilinearly to the size of each image, with
    antialiasing where that is smaller (SigLIP 2); or bicubically (DeepSeek-OCR 2).
    """

    side: int
    cubic: bool = False


@dataclass(frozen=True)
class BilinearTable:
    """The same without antialiasing (PaddleOCR-VL), after `unread` rows of the table (Hunyuan-VL)."""

    side: int
    unread: int = 0


@dataclass(frozen=True)
class BicubicTable:
    """A table of `side` times `side` positions, interpolated bicubically to the size of each image
    (GLM-4.1V).
    """

    side: int


@dataclass(frozen=True)
class ClipTable:
    """`BicubicTable`, and for videos of more than one time step, at most `steps`, sines and cosines of the
    step (Kimi K2.5).
    """

    side: int
    steps: int


@dataclass(frozen=True)
class FadingTable:
    """A table of `side` times `side` positions with zeros around it, interpolated linearly to the size of an
    image with height and width exchanged; patches count through it row by row (Muse Glimmer).
    """

    side: int


@dataclass(frozen=True)
class CroppedTable:
    """A table of `side` times `side` positions, interpolated bilinearly to a square on the longer side of
    each image, whose upper left part the image gets (C-RADIO, arXiv:2312.06709).
    """

    side: int


@dataclass(frozen=True)
class FixedTable:
    """A table of `side` times `side` positions, one per patch, and one for the class token (CLIP)."""

    side: int


@dataclass(frozen=True)
class CubicTable:
    """`FixedTable` for images of `side` times `side` patches; for other square sizes the patches' rows are
    interpolated bicubically (InternVL).
    """

    side: int


@dataclass(frozen=True)
class FractionTable:
    """A table of `side` times `side` positions for images of any size: the row of a patch is that of the
    table at the same fraction of the height, rounded down, and likewise the column (Idefics 3). The fraction
    is a product with the inverse of the height, or if `divided` a quotient (MiniCPM-V 4.6), which float32
    may round to another side of a border.
    """

    side: int
    divided: bool = False


@dataclass(frozen=True)
class AxesTable:
    """Two tables of `size` positions, for columns and rows, which are added (Gemma 4)."""

    size: int
