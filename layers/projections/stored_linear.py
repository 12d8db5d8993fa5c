"""Frozen linear layers whose weights stay in the codes and scales of a quantised checkpoint.

    y = x W^T + b,  dx = dy W        W = the float32 products of codes and scales, rounded once

W is decoded in forward and again in backward (layers/projections/low_rank.py), and never kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from liger_models.convert.quantised.formats import CODES, SCALE, SECOND, Blocks, QuantisedWeight
from liger_models.layers.projections.low_rank import low_rank_linear
from liger_models.layers.projections.low_rank_plan import Projection

_BUFFERS = {SCALE: "stored_scale", SECOND: "stored_second_scale"}


class StoredLinear(nn.Linear):
    """A frozen linear layer over the bytes of a quantised weight.

    The parts of the weight are uint8, so that no cast of a model changes them: `weight` holds the codes
    [out, bytes of a row], buffers the scales.

    Args:
        like: the dense layer, on the meta device, in the dtype to decode to. Its bias is taken over.
        stored: the weight [out, in]. `can_store` must hold.
    """

    def __init__(self, like: nn.Linear, stored: QuantisedWeight):
        nn.Module.__init__(self)
        self.out_features, self.in_features = stored.shape
        self.stored, self.decoded_dtype = stored, like.weight.dtype
        self.bias = like.bias
        for role, info in stored.parts.items():
            if role in (CODES, *_BUFFERS):
                rows = (self.out_features, -1) if role == CODES else (-1,)
                empty = torch.empty(info.shape, dtype=info.dtype, device="meta").reshape(-1)
                self._hold(role, empty.view(torch.uint8).view(rows))

    @staticmethod
    def can_store(weight: QuantisedWeight) -> bool:
        """Whether a weight is one matrix that codes and scales alone describe."""
        parts = weight.parts.keys() - {CODES, *_BUFFERS}
        return isinstance(weight.format, Blocks) and len(weight.shape) == 2 and not parts

    @torch.no_grad()
    def fill(self, parts: Mapping[str, Tensor]) -> None:
        """Copy the parts of the weight, as the files have them.

        Raises:
            BadScaleError: a scale is not finite, or not positive.
        """
        self._format.check_scales(self.stored, parts)
        for role, buffer in self._held().items():
            buffer.copy_(parts[role].reshape(-1).view(torch.uint8).view(buffer.shape))

    def dense(self, weight: Tensor) -> Tensor:
        """Decode the codes to the matrix [out, in].

        Raises:
            TypeError: the codes were cast or replaced.
        """
        if weight.dtype != torch.uint8:
            raise TypeError(
                f"the weight of a layer that keeps its quantised bits is {weight.dtype}, expected the codes "
                "as torch.uint8; load the model without keep_quantised to cast, shard or train its weights"
            )
        parts = {}
        for role, held in {**self._held(), CODES: weight}.items():
            info = self.stored.parts[role]
            parts[role] = held.reshape(-1).view(info.dtype).view(info.shape)
        return self._format.matrix(self.stored.shape, parts, self.decoded_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x or of autocast."""
        return low_rank_linear(x, self.low_rank_projection())

    def low_rank_projection(self) -> Projection:
        """Return the layer for layers/projections/low_rank.py."""
        return Projection(self.weight, self.bias, (), self.dense)

    @torch.no_grad()
    def as_dense(self, dtype: torch.dtype) -> nn.Linear:
        """The layer with its decoded weight and the same bias."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.dense(self.weight).to(dtype), requires_grad=False)
        plain.register_parameter("bias", self.bias)
        return plain.train(self.training)

    @property
    def _format(self) -> Blocks:
        format = self.stored.format
        assert isinstance(format, Blocks)
        return format

    def _hold(self, role: str, stored: Tensor) -> None:
        if role == CODES:
            self.weight = nn.Parameter(stored, requires_grad=False)
        else:
            self.register_buffer(_BUFFERS[role], stored)

    def _held(self) -> dict[str, Tensor]:
        buffers = {role: name for role, name in _BUFFERS.items() if role in self.stored.parts}
        return {CODES: self.weight, **{role: self.get_buffer(name) for role, name in buffers.items()}}
