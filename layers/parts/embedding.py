"""Token embeddings, scaled or normalised in some families, and learned positions.

x = scale * weight[id],    the scale rounded to the weight's dtype
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from liger_models.kernels import embedding, rms_norm
from liger_models.layers.specs import NormSpec


class TrainedRows(nn.Module):
    """Trained rows of a frozen table, in float32, for new tokens below adapters.

    PEFT's switch of adapters, `_disable_adapters`, restores the rows of the table.

    Args:
        table: [V, H], with the initial values.
        rows: of the table.
    """

    merged = False

    def __init__(self, table: Tensor, rows: range):
        super().__init__()
        self.first, self._disable_adapters = rows.start, False
        self.weight = nn.Parameter(table.detach()[rows.start : rows.stop].float().clone())

    def looked_up(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids [...] and their rows of the table [..., H] -> rows [..., H], with the trained ones."""
        if self._disable_adapters:
            return x
        own, count = ids - self.first, len(self.weight)
        rows = nn.functional.embedding(own.clamp(0, count - 1), self.weight).to(x.dtype)
        return torch.where(((own >= 0) & (own < count))[..., None], rows, x)

    def within(self, table: Tensor) -> Tensor:
        """The table [V, H] with the trained rows, a copy."""
        if self._disable_adapters:
            return table
        rows = self.weight.to(table.dtype)
        return torch.cat([table[: self.first], rows, table[self.first + len(rows) :]])


class TokenEmbedding(nn.Embedding):
    """Embeddings of ids.

    Args:
        scale: multiplies the embeddings.
        padding_idx: row without a gradient.
        round_scale: first round the scale to the embeddings' dtype, as in the training of Gemma: in bfloat16
            the square root of 3072 is 55.5.
        norm: an RMSNorm of the embeddings, without a weight.

    Attributes:
        trained_rows: rows that are trained while the others are frozen, if any.
        axes: the number of rows that layouts divide the table by, if any (`canonical_forms`).
    """

    axes: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        padding_idx: int | None = None,
        round_scale: bool = True,
        norm: NormSpec | None = None,
    ):
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.trained_rows: TrainedRows | None = None
        self.embed_scale = scale  # PEFT looks for this name to scale an adapter's output
        self.round_scale, self.norm = round_scale, norm

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H]."""
        x, scale = embedding(ids, self.weight, self.padding_idx), self.embed_scale
        if self.trained_rows is not None:
            x = self.trained_rows.looked_up(ids, x)
        if self.norm is not None:
            x = rms_norm(x, None, self.norm.eps, cast=self.norm.cast)
        if not self.round_scale:
            return x * scale
        return x if scale == 1.0 else x * torch.full((), scale, dtype=x.dtype, device=x.device)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.embed_scale == 1.0 else f", scale={self.embed_scale:.6g}")


class LearnedPositions(nn.Module):
    """A learned vector for each position (Radford et al., 2019: GPT-2).

    Not an `nn.Embedding`, which tools would take for a table of tokens.

    Args:
        positions: the number of positions.
        hidden_size: the width H of the vectors.
        first: row of position 0; nothing reads the rows before it.
    """

    def __init__(self, positions: int, hidden_size: int, first: int = 0):
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(first + positions, hidden_size))

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the vectors from a normal distribution."""
        nn.init.normal_(self.weight, 0.0, std, generator)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H], positions [T] -> x plus the vectors of its positions, in x's dtype."""
        rows = positions + self.first if self.first else positions
        return x + nn.functional.embedding(rows, self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"
