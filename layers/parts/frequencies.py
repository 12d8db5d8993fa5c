"""Learned factors of rotary frequencies (Mistral Large 4):

angle[t, i] = position[t] * inv_freq[i] * exp(alpha[i])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from liger_models.layers.specs import RopeSpec


class LearnedFrequencies(nn.Module):
    """Stores the logarithms of the factors, in float32. Like the reference, it gives them no gradient.

    Args:
        dim: the number of rotated dimensions of a head.
    """

    alpha: Tensor

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("alpha", torch.zeros(dim // 2, dtype=torch.float32))

    def forward(self) -> Tensor:
        """The factors, [dim / 2] float32."""
        return self.alpha.float().exp()

    def reset_parameters(self, *_: object) -> None:
        """Set all factors to one."""
        nn.init.zeros_(self.alpha)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedFrequencies:
        """Apply as for `model.to(torch.bfloat16)`, but keep float32."""
        before = self.alpha
        super()._apply(fn, recurse)
        if self.alpha.itemsize < before.itemsize:
            self.alpha = before.to(self.alpha.device)
        return self


def make_frequencies(ropes: Iterable[RopeSpec]) -> LearnedFrequencies | None:
    """Make the factors that rotary settings of a model share; None if no frequencies are learned.

    Raises:
        ValueError: settings of several sizes.
    """
    dims = {rope.dim for rope in ropes if rope.learned}
    if len(dims) > 1:
        raise ValueError(f"learned rotary frequencies are one list, and layers rotate {dims} dimensions")
    return LearnedFrequencies(dims.pop()) if dims else None
