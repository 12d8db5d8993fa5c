"""Mixers: the part of a layer that mixes tokens, chosen by the type of its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_models.layers.attention.compressed.attention import CompressedAttention
from liger_models.layers.attention.cross_attention import CrossAttention
from liger_models.layers.attention.differential import DifferentialAttention
from liger_models.layers.attention.latent_attention import LatentAttention
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.attention.shared_attention import SharedAttention
from liger_models.layers.conformer.context_attention import ContextAttention
from liger_models.layers.conformer.distance_attention import DistanceAttention
from liger_models.layers.conformer.light_conv import LightConvolution
from liger_models.layers.conformer.local_attention import LocalAttention
from liger_models.layers.conformer.relative_attention import RelativeAttention
from liger_models.layers.grids.grid_attention import GridAttention
from liger_models.layers.grids.grid_conv import GridConvolution
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.channel_delta import ChannelDelta
from liger_models.layers.recurrent.convolved_attention import ConvolvedAttention
from liger_models.layers.recurrent.gated_conv import GatedConvolution
from liger_models.layers.recurrent.gated_delta import GatedDelta
from liger_models.layers.recurrent.lightning import LightningAttention
from liger_models.layers.recurrent.rg_lru import RGLRU
from liger_models.layers.recurrent.selective import SelectiveScan
from liger_models.layers.recurrent.ssd import SSD
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AttentionSpec,
    ChannelDeltaSpec,
    CompressedAttentionSpec,
    ContextAttentionSpec,
    ConvolvedAttentionSpec,
    CrossAttentionSpec,
    DifferentialAttentionSpec,
    DistanceAttentionSpec,
    GatedConvSpec,
    GatedDeltaSpec,
    GridAttentionSpec,
    GridConvSpec,
    LatentAttentionSpec,
    LightConvSpec,
    LightningSpec,
    LocalAttentionSpec,
    RelativeAttentionSpec,
    RGLRUSpec,
    SelectiveSpec,
    SharedAttentionSpec,
    SSDSpec,
)


class Mixer(Protocol):
    """Interface of a token mixer: attention or a recurrent layer."""

    def __call__(self, x: Tensor, sequences: Sequences, *layer_inputs: Any) -> Any:
        """x [T, H] -> [T, H]."""

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Empty cache tensors for `batch` sequences of up to `max_length` tokens."""

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token kept for the backward pass."""


MIXERS: dict[type, Callable[..., Mixer]] = {
    AttentionSpec: Attention,
    SharedAttentionSpec: SharedAttention,
    LatentAttentionSpec: LatentAttention,
    CompressedAttentionSpec: CompressedAttention,
    DifferentialAttentionSpec: DifferentialAttention,
    ConvolvedAttentionSpec: ConvolvedAttention,
    CrossAttentionSpec: CrossAttention,
    GridAttentionSpec: GridAttention,
    GridConvSpec: GridConvolution,
    LocalAttentionSpec: LocalAttention,
    DistanceAttentionSpec: DistanceAttention,
    RelativeAttentionSpec: RelativeAttention,
    ContextAttentionSpec: ContextAttention,
    LightConvSpec: LightConvolution,
    GatedDeltaSpec: GatedDelta,
    SSDSpec: SSD,
    SelectiveSpec: SelectiveScan,
    GatedConvSpec: GatedConvolution,
    ChannelDeltaSpec: ChannelDelta,
    LightningSpec: LightningAttention,
    RGLRUSpec: RGLRU,
}

MIXER_NAMES: dict[type, str] = {
    CrossAttentionSpec: "cross_attn",
    GatedDeltaSpec: "linear_attn",
    SSDSpec: "mamba",
    SelectiveSpec: "mamba",
    GatedConvSpec: "conv",
    GridConvSpec: "conv",
    LightConvSpec: "conv",
    ChannelDeltaSpec: "linear_attn",
    RGLRUSpec: "rg_lru",
}
"""The names of mixers in the module tree; of others "self_attn"."""
