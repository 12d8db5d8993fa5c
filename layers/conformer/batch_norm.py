"""Batch norm (Ioffe and Szegedy, 2015, arXiv:1502.03167) of frames, with stored moments.

    y = (x - running_mean) / sqrt(running_var + eps) * weight + bias        for each channel

The moments are those of the checkpoint, in training, too, and are not trained. Those of a batch would make
clips depend on one another, and on padding, packing, accumulation and the division over processes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.recompute.activation_memory import ActivationMemory


class StoredBatchNorm(nn.Module):
    """Normalise channels by stored moments.

    Args:
        channels: their number C.
        eps: added to variances.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = (nn.Parameter(torch.empty(channels)) for _ in range(2))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))  # of the checkpoint, unread

    def forward(self, x: Tensor) -> Tensor:
        """x [F, C] -> [F, C], computed in float32 or wider."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        moments = self.running_mean.to(dtype), self.running_var.to(dtype)
        y = F.batch_norm(x.to(dtype), *moments, self.weight.to(dtype), self.bias.to(dtype), eps=self.eps)
        return y.to(x.dtype)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: the input, in float32."""
        return max(4, itemsize) * len(self.weight)

    def reset_parameters(self, *_: object) -> None:
        """Initialise so that channels stay as they are."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        return f"{len(self.weight)} channels, eps={self.eps}"
