"""PEFT's own forward of a linear layer, in bytes: of DoRA, `lora_bias`, IA3 and the like (hf/adapters).

It casts the input and makes several tensors as wide as the output. Except at the level `all`, it keeps only
its input and is recomputed in the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    """Bytes per token that a linear layer takes at one moment of its backward pass (including its recomputed
    forward pass) in addition to the gradient of its output; or that it keeps.

    Attributes:
        with_input: its input is needed, which is not counted here.
        per_input, per_output: per element of the input, and of the output.
    """

    with_input: bool
    per_input: int
    per_output: int

    def size(self, width: int, height: int) -> int:
        return self.per_input * width + self.per_output * height


class PeftForward(NamedTuple):
    """PEFT's own forward of a layer, for activations of one size.

    Attributes:
        moments: of its backward pass, candidates for the peak.
        forward: the peak of its forward pass, its output included.
        kept: kept at the level `all`.
        begun: bytes per output element of the gradients computed before its forward pass is repeated.
    """

    moments: tuple[Moment, ...]
    forward: Moment
    kept: Moment
    begun: int


def _forward(
    moments: list[tuple[bool, int, int]], forward: tuple[int, int], kept: tuple[bool, int, int], begun: int
) -> PeftForward:
    return PeftForward(
        tuple(Moment(*moment) for moment in moments), Moment(True, *forward), Moment(*kept), begun
    )


# By what PEFT computes: for activations of 16 bits, and of 32. Counted with PEFT 0.21 and adapters in
# float32; verified by tests/layers/memory/test_adapter_costs.py.
PEFT_FORWARDS = {
    "lora": (
        _forward([(False, 0, 10), (False, 8, 2), (True, 4, 8)], (4, 10), (False, 4, 0), 6),
        _forward([(False, 12, 0), (True, 0, 8), (True, 4, 0)], (0, 12), (True, 0, 0), 4),
    ),
    "lora, dropout": (
        _forward([(False, 0, 10), (True, 12, 8)], (12, 10), (False, 8, 0), 6),
        _forward([(False, 12, 0), (True, 8, 8)], (8, 12), (False, 8, 0), 4),
    ),
    "dora": (
        _forward([(False, 4, 24), (False, 8, 2)], (4, 18), (False, 4, 6), 10),
        _forward([(False, 8, 4), (False, 12, 0), (True, 0, 20), (True, 4, 4)], (0, 20), (True, 0, 8), 4),
    ),
    "dora, dropout": (
        _forward([(False, 8, 26), (False, 16, 2)], (8, 22), (False, 8, 8), 10),
        _forward([(False, 12, 8), (False, 16, 0), (True, 8, 20)], (4, 24), (False, 8, 8), 4),
    ),
    "ia3 on inputs": (
        _forward([(False, 16, 0), (True, 10, 0)], (10, 2), (False, 4, 0), 0),
        _forward([(True, 12, 0)], (4, 4), (True, 0, 0), 0),
    ),
    "ia3 on outputs": (
        _forward([(False, 0, 14), (False, 2, 2), (True, 0, 6), (True, 2, 0)], (0, 8), (False, 0, 2), 4),
        _forward([(False, 0, 12), (False, 4, 4), (True, 0, 4), (True, 4, 0)], (0, 8), (False, 0, 4), 0),
    ),
    # PEFT casts more in layers of bitsandbytes.
    "ia3 on outputs, quantised": (
        _forward([(False, 0, 16), (True, 6, 10)], (6, 8), (False, 0, 4), 4),
        _forward([(False, 0, 12), (False, 4, 4), (True, 0, 4), (True, 4, 0)], (0, 8), (False, 0, 4), 0),
    ),
}
