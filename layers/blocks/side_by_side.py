"""The pre-norm block whose two mixers read the same input."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import Streams, add_and_norm
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec, RecurrentSpec


class SideBySideBlock(PreNormBlock):
    """`n = norm(x); h = x + attention(n) + recurrent(n); y = h + mlp(norm(h))` (Falcon-H1, arXiv:2507.22448,
    section 2), each of the three branches multiplied by one of the `branch_scales`.
    """

    supports = ("second_mixer", "branch_scales")
    needs = ("mixer", "second_mixer", "mlp")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if [isinstance(mixer, RecurrentSpec) for mixer in spec.mixers] != [False, True]:
            kinds = [type(mixer).__name__ for mixer in spec.mixers]
            raise ValueError(f"the mixers side by side are {kinds}; expected attention, and one with a state")

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        first, second = (self._branch(i, mixer(x, sequences)) for i, mixer in enumerate(self.mixers))
        x, residual = add_and_norm(self.post_attention_layernorm, self._scaled(first + second), residual)
        return self._scaled(self._branch(2, self.mlp(x, sequences))), residual
