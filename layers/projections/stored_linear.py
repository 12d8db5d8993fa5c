"""Frozen linear layers whose weights stay in the codes and scales of a quantised checkpoint.

    y = x W^T + b,  dx = dy W        W = the float32 products of codes and scales, rounded once

    y = T(x) W^T + b             where the model rounds its inputs (ternary.py)

W is decoded in forward and again in backward (layers/projections/low_rank.py), and never kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.convert.errors import UnsupportedModelError
from liger_models.convert.quantised.formats import CODES
from liger_models.convert.quantised.kept import Kept
from liger_models.kernels import Float8
from liger_models.layers.projections.float8 import Float8Settings
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.low_rank import low_rank_linear
from liger_models.layers.projections.low_rank_plan import Projection
from liger_models.layers.projections.stored_weight import (
    decode,
    float8_rows,
    has_float8_rows,
    held,
    hold,
    part_name,
)
from liger_models.layers.projections.ternary import ternary_linear
from liger_models.layers.specs.ternary import TernarySpec


class StoredLinear(nn.Linear):
    """A frozen linear layer over the bytes of a quantised weight: `weight` holds the codes [out, bytes of a
    row].

    Args:
        like: the dense layer, on the meta device, in the dtype to decode to. Its bias is taken over.
        kept: the weight [out, in].

    Attributes:
        float8: how the products with the decoded weight run in float8; None: in its dtype. See `set_float8`.
        ternary: its inputs are rounded; None: they are not.
    """

    float8: Float8Settings | None = None
    ternary: TernarySpec | None = None

    def __init__(self, like: nn.Linear, kept: Kept):
        nn.Module.__init__(self)
        if unbiased := getattr(like, "unbiased", ()):
            raise UnsupportedModelError(
                f"{', '.join(unbiased)} has no bias, and the projections of the same input have one: their "
                "quantised weights are not kept in their bits; load the model without keep_quantised"
            )
        self.out_features, self.in_features = kept.shape
        self.kept_weights, self.decoded_dtype = {"weight": kept}, like.weight.dtype
        hold(self, "weight", kept)
        self.bias = like.bias
        self.ternary = getattr(like, "ternary", None)
        self.stacked_vectors = tuple(part_name("weight", role) for role in kept.parts if role != CODES)

    def dense(self, weight: Tensor) -> Tensor:
        """Decode the codes to the matrix [out, in].

        Raises:
            TypeError: the codes were cast or replaced.
        """
        kept = self.kept_weights["weight"]
        parts = {**held(self, "weight", kept), CODES: weight}
        return decode(kept, parts, self.decoded_dtype, self.decoded_dtype)

    def rows(self, weight: Tensor) -> Float8:
        """The codes and their scales as an operand of a float8 product, if they can be one."""
        kept = self.kept_weights["weight"]
        return float8_rows(kept, {**held(self, "weight", kept), CODES: weight})

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of x or of autocast."""
        if self.ternary is not None:
            heights = (self.out_features,)
            return ternary_linear(x, self.weight, self.bias, self.ternary, heights, self.dense)
        return low_rank_linear(x, self.low_rank_projection())

    def low_rank_projection(self) -> Projection:
        """Return the layer for layers/projections/low_rank.py."""
        rows = self.rows if has_float8_rows(self.kept_weights["weight"]) else None
        return Projection(self.weight, self.bias, (), self.dense, float8=self.float8, rows=rows)

    @torch.no_grad()
    def as_dense(self) -> nn.Linear:
        """The layer with its decoded weight and the same bias."""
        kind = nn.Linear if self.ternary is None else Linear
        plain = kind(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.dense(self.weight), requires_grad=False)
        plain.register_parameter("bias", self.bias)
        if isinstance(plain, Linear):
            plain.ternary = self.ternary
        return plain.train(self.training)
