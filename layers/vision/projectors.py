"""From what an encoder gives of patches to features of the width of the language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.linear import Linear
from liger_models.layers.norm import make_norm
from liger_models.layers.spec import PatchMergerSpec


class PatchMerger(nn.Module):
    """`linear_2(gelu(linear_1(merged)))`, merged the norm of `merge`^2 patches, side by side (Qwen2-VL,
    arXiv:2409.12191, section 2).

    Args:
        width: that of a patch, D.
        hidden_size: that of the language model, H.
        spec: what is merged, and the norm.
    """

    def __init__(self, width: int, hidden_size: int, spec: PatchMergerSpec):
        super().__init__()
        self.merged, self.norm_merged = width * spec.merge**2, spec.norm_merged
        self.norm = make_norm(self.merged if spec.norm_merged else width, spec.norm)
        self.linear_1 = Linear(self.merged, self.merged)
        self.linear_2 = Linear(self.merged, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches that are merged -> [P / merge^2, H]."""
        x = x.view(-1, self.merged) if self.norm_merged else x
        x = self.norm(x).view(-1, self.merged)
        return self.linear_2(F.gelu(self.linear_1(x)))


PROJECTORS: dict[type, type[nn.Module]] = {PatchMergerSpec: PatchMerger}
