"""Positions: rotary embeddings and query scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and its scaling to longer contexts.

    `dim` is the number of rotated dimensions of a head (the rest pass unrotated); `interleaved` pairs the
    dimensions (2i, 2i+1) instead of (i, i + dim/2). Only the first `turning` of these pairs are rotated
    (None: all). For multi-axis positions, `axes` assigns an axis to each pair, and `frequencies` the pair
    whose frequency it uses, if not its own. Twice as many `axes` give the first and then the second dimension
    of each pair an angle of its own, which is no rotation where these differ (Hunyuan-VL). With `halves` each
    half of a head is rotated separately, the first by the first half of the pairs, arranged as in a whole
    head (Gemma 4's encoder). `clockwise` rotates
    in the opposite direction (nanochat). With `learned` the frequencies are also multiplied by learned
    factors, which the model stores (layers/parts/frequencies.py). The fields after
    `max_position_embeddings` belong to the rope types documented in `layers/sequences/rotary.py`; they are
    None for types that do not use them.
    """

    dim: int
    theta: float = 10_000.0
    type: RopeType = "default"
    interleaved: bool = False
    turning: int | None = None
    axes: tuple[int, ...] | None = None
    frequencies: tuple[int, ...] | None = None
    halves: bool = False
    clockwise: bool = False
    learned: bool = False
    max_position_embeddings: int | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the longest position of a batch."""
        return self.type in ("dynamic", "longrope")

    @property
    def position_limit(self) -> int | None:
        """First position beyond the range of the rotary embedding; None if it is unlimited."""
        return None if self.type == "dynamic" else self.max_position_embeddings


@dataclass(frozen=True)
class QueryScaleSpec:
    """A factor of the queries that grows with their position (Llama 4, Ministral 3), which keeps attention
    sharp over more keys: 1 + beta * log(1 + floor((first + position) / length)), or as a `power` (Beam)
    (1 + (first + position) / length) ^ beta, or if it starts `late` (Inkling)
    1 + beta * log(max(1, (first + position) / length)). `first` is the value of the first position.
    """

    beta: float
    length: int
    first: int = 0
    power: bool = False
    late: bool = False
