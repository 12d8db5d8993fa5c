"""Token embeddings, scaled or normalised in some families, and positions that are added to them.

x = scale * weight[id],    the scale rounded to the weight's dtype
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from liger_models.kernels import embedding, rms_norm
from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._copies import to_device
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.specs import ModelSpec, NormSpec


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
        norm: an RMSNorm of the embeddings; with a weight it is the module `embed_norm`.

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
        self.embed_norm = make_norm(hidden_size, norm) if norm is not None and norm.weighted else None

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H]."""
        x, scale = embedding(ids, self.weight, self.padding_idx), self.embed_scale
        if self.trained_rows is not None:
            x = self.trained_rows.looked_up(ids, x)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        elif self.norm is not None:
            x = rms_norm(x, None, self.norm.eps, cast=self.norm.cast)
        if not self.round_scale:
            return x * scale
        return x if scale == 1.0 else x * torch.full((), scale, dtype=x.dtype, device=x.device)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.embed_scale == 1.0 else f", scale={self.embed_scale:.6g}")


def make_positions(spec: ModelSpec) -> LearnedPositions | SinusoidalPositions | None:
    """The vectors of positions that a model adds to its embeddings; None: it adds none.

    Raises:
        ValueError: both kinds.
    """
    if spec.learned_positions is not None and spec.sinusoidal_positions:
        raise ValueError("positions are learned or sinusoidal, and this spec asks for both; expected one")
    if spec.learned_positions is not None:
        return LearnedPositions(spec.learned_positions, spec.hidden_size, spec.unused_positions)
    if not spec.sinusoidal_positions:
        return None
    return SinusoidalPositions(spec.hidden_size, spec.unused_positions, spec.zero_position)


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


class SinusoidalPositions(nn.Module):
    """A fixed vector for each position p, [sin(p f) | cos(p f)] with f_j = 10000^(-j / (H/2 - 1)) (Vaswani et
    al., 2017, arXiv:1706.03762, section 3.5, in the order of their code).

    Args:
        hidden_size: the even width H of the vectors, at least 4.
        first: p of position 0.
        zero: the position with a vector of zeros, if any.

    Raises:
        ValueError: another width.
    """

    def __init__(self, hidden_size: int, first: int = 0, zero: int | None = None):
        super().__init__()
        if hidden_size % 2 or hidden_size < 4:
            raise ValueError(
                f"hidden_size is {hidden_size}; sines and cosines need an even width of 4 or more"
            )
        self.width, self.first, self.zero = hidden_size, first, zero

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H], positions [T] -> x plus the vectors of its positions, rounded to x's dtype."""
        frequencies = to_device(_frequencies(self.width // 2), positions.device)
        angles = (positions + self.first).float()[:, None] * frequencies
        vectors = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        if self.zero is not None:
            vectors = vectors.masked_fill((positions == self.zero)[:, None], 0.0)
        return x + vectors

    def extra_repr(self) -> str:
        return f"{self.width}"


@cached_tensors()
def _frequencies(count: int) -> Tensor:
    """[count] in float32 on the host, as the reference computes them."""
    step = math.log(10000) / (count - 1)
    return torch.exp(torch.arange(count, device="cpu").float() * -step)
