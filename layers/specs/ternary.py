"""Products of rounded operands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TernarySpec:
    """Linear layers of decoder layers round their inputs to 8 bits, and with `rounds_weights` their weights
    to three values; without, the weights have three values already: layers/projections/ternary.py.
    """

    rounds_weights: bool = True
