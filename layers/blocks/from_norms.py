"""The block whose residual streams are the outputs of its norms."""

from __future__ import annotations

from torch import Tensor

from liger_models.layers.blocks.block import Streams, add_and_norm
from liger_models.layers.blocks.pre_norm import PreNormBlock
from liger_models.layers.sequences.sequences import Sequences


class FromNormsBlock(PreNormBlock):
    """`n = norm(x); h = a n + mixer(n); m = norm(h); y = b m + mlp(m)` (MiniMax-Text-01, arXiv:2501.08313,
    section 2.1), a and b the `stream_scales`. Each branch may be multiplied by one of the `branch_scales`.
    """

    supports: tuple[str, ...] = ("branch_scales", "stream_scales")

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        of_mixer, of_mlp = self.spec.stream_scales
        x = add_and_norm(self.input_layernorm, x, residual)[0]
        mixed = self._scaled(self._branch(0, self.token_mixer(x, sequences)))
        x = add_and_norm(self.post_attention_layernorm, mixed, of_mixer * x)[0]
        return self._scaled(self._branch(2, self.mlp(x, sequences))), of_mlp * x
