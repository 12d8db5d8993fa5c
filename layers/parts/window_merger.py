"""Merging of patches between two layers of an encoder (MiniCPM-V 4.6):

y = x + out_proj(attention(q, k, v)),   q, k, v of norm(x), within windows of 2 times 2 patches
linear_2(gelu(linear_1(merged_norm(y_1 | y_2 | y_3 | y_4)))) + mean of the four
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.specs import WindowMergerSpec


class WindowMerger(nn.Module):
    """Turns each window of `spec.merge`^2 patches into one.

    Args:
        width: of a patch, D.
        spec: the heads, the norm and the inner width.
        merge: side of the blocks of windows that the projector merges.

    Raises:
        ValueError: the width is not a multiple of the heads.
    """

    def __init__(self, width: int, spec: WindowMergerSpec, merge: int):
        super().__init__()
        if width % spec.num_attention_heads:
            raise ValueError(f"{spec.num_attention_heads} heads of {width} dimensions together")
        self.side, self.blocks, self.heads = spec.merge, merge, spec.num_attention_heads
        merged = width * spec.merge**2
        self.norm = make_norm(width, spec.norm)
        self.qkv_proj = PackedLinear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), bias=True)
        self.out_proj = Linear(width, width)
        self.merged_norm = make_norm(merged, spec.norm)
        self.linear_1 = Linear(merged, spec.size)
        self.linear_2 = Linear(spec.size, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of (side * merge)^2 patches -> [P / side^2, D], in blocks of merge^2."""
        windows = self._windows(x)  # [W, side^2, D]
        y = windows + self.out_proj(self._attended(windows)).view_as(windows)
        merged = self.merged_norm(y.flatten(1))
        return self.linear_2(F.gelu(self.linear_1(merged), approximate="tanh")) + y.mean(1)

    def _windows(self, x: Tensor) -> Tensor:
        """Patches by window: a block comes row by row, which cuts through its windows."""
        blocks = x.view(-1, self.blocks, self.side, self.blocks, self.side, x.shape[-1])
        return blocks.transpose(2, 3).reshape(-1, self.side**2, x.shape[-1])

    def _attended(self, windows: Tensor) -> Tensor:
        """Attention within windows [W, side^2, D] -> [W * side^2, D]."""
        qkv = self.qkv_proj(self.norm(windows.flatten(0, 1)))
        q, k, v = qkv.view(*windows.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = at_least_float32(q @ k.mT) * q.shape[-1] ** -0.5  # [W, heads, side^2, side^2]
        attended = scores.softmax(-1).to(v.dtype) @ v
        return attended.transpose(1, 2).reshape(-1, windows.shape[-1])
