"""Attention's output on the host, for layers that are recomputed.

A layer at the level `offload` runs twice, but its attention once, if copying the output to the host and back
takes less time than computing it again. An element of the output takes 4 operations for each visible token,
on average n / 2 tokens in a document of n, and its two copies move 4 bytes: n / 2 operations for each byte.
While a bus moves a byte, an H200 makes about 12,000 operations (600 TFLOP/s, 50 GB/s), an A100 8,000, an
RTX 4090 6,000. The copy to the host overlaps the rest of the layer, so half of these are the price: at most
6,000, and 16,384 tokens save 8,192.
"""

from __future__ import annotations

from liger_models.layers.specs import AttentionSpec

LEAST_TOKENS = 1 << 14


def keeps_output(spec: AttentionSpec, longest: int) -> bool:
    """Whether the output is copied to the host, for documents of up to `longest` tokens."""
    visible = min(longest, spec.window or longest, spec.chunk or longest)
    return visible >= LEAST_TOKENS and not spec.dropout
