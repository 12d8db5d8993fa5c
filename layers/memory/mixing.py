"""Operations of token mixers."""

from __future__ import annotations

from typing import Any

from liger_models.layers.blocks import Block
from liger_models.layers.specs import AttentionSpec, RecurrentSpec


def mixing_operations(layer: Block, seq: int) -> int:
    """Operations per token of the mixer's forward pass, on average, excluding its projections."""
    mixers = layer.spec.mixers
    return sum(m.state_flops if isinstance(m, RecurrentSpec) else 4 * _attended(m, seq) for m in mixers)


def _attended(mixer: Any, seq: int) -> int:
    """Average elements of the keys, or of the values, that a query attends to, over all heads."""
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    width = (mixer.q_size + mixer.o_size) // 2
    return width * min(mixer.window or mixer.chunk or seq, (seq + 1) // 2 if mixer.causal else seq)
