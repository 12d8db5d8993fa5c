"""Norms of hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormCast = Literal["llama", "gemma", "float32"]


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm: `x / rms(x) * (offset + weight)`; `cast` defines where the result is rounded (see
    kernels/norms/rms_norm.py). With `float32_stream` the residual stream is in float32, and norms round it to
    the model's dtype first. Without `weighted` there is no weight.
    """

    eps: float = 1e-6
    offset: float = 0.0
    cast: NormCast = "llama"
    float32_stream: bool = False
    weighted: bool = True


@dataclass(frozen=True)
class GatedNormSpec:
    """RMSNorm times a gate of rank `rank` of its result: `GatedRMSNorm` in layers/parts/norm.py."""

    norm: NormSpec
    rank: int


@dataclass(frozen=True)
class LayerNormSpec:
    """LayerNorm: `(x - mean(x)) / std(x) * (offset + weight) + bias`, with or without a weight and a
    bias.
    """

    eps: float = 1e-5
    bias: bool = True
    offset: float = 0.0
    weighted: bool = True
