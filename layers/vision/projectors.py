"""From what an encoder gives of patches to features of the width of the language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.linear import Linear
from liger_models.layers.mlp import plain_activation
from liger_models.layers.norm import make_norm
from liger_models.layers.spec import MistralMergerSpec, PatchMergerSpec


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


class MistralMerger(nn.Module):
    """`linear_2(act(linear_1(merging_layer(merged))))`, merged the norms of `merge`^2 patches, whose channels
    take turns (Mistral Small 3.1).

    Args:
        width: that of a patch, D.
        hidden_size: that of the language model, H.
        spec: what is merged, the norm, the activation and the biases.
    """

    def __init__(self, width: int, hidden_size: int, spec: MistralMergerSpec):
        super().__init__()
        self.patches, self.activation = spec.merge**2, plain_activation(spec.activation)
        self.norm = make_norm(width, spec.norm)
        self.merging_layer = Linear(width * self.patches, width, bias=False)
        self.linear_1 = Linear(width, hidden_size, bias=spec.bias)
        self.linear_2 = Linear(hidden_size, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, D], in blocks of patches that are merged -> [P / merge^2, H]."""
        blocks = self.norm(x).unflatten(0, (-1, self.patches))
        merged = self.merging_layer(blocks.transpose(1, 2).flatten(1))
        return self.linear_2(self.activation(self.linear_1(merged)))


PROJECTORS: dict[type, type[nn.Module]] = {
    PatchMergerSpec: PatchMerger,
    MistralMergerSpec: MistralMerger,
}
