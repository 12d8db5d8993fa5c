"""Token embeddings, scaled in some families.

x = scale * weight[id],    the scale rounded to the weight's dtype
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Embeddings of ids.

    Args:
        scale: multiplies the embeddings. It is first rounded to their dtype, as in the training of the models
            that have one (Gemma): in bfloat16 the square root of 3072 is 55.5.
        padding_idx: row without a gradient.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0, padding_idx: int | None = None):
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.embed_scale = scale  # PEFT looks for this name to scale an adapter's output

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H]."""
        x, scale = super().forward(ids), self.embed_scale
        return x if scale == 1.0 else x * torch.full((), scale, dtype=x.dtype, device=x.device)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.embed_scale == 1.0 else f", scale={self.embed_scale:.6g}")
