"""Several projections of one input in one matrix product.

    PackedLinear(H, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024})(x) = x @ cat(W_q, W_k, W_v)^T

The weights lie below one another, in the order of the names, which are those of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from liger_models.convert.checkpoints.weight_map import Cat, Expr, Ref


class PackedLinear(nn.Linear):
    """A linear layer whose output is those of `parts`, side by side.

    Args:
        in_features: the width of the input.
        parts: the widths of the projections, by name.
        bias: whether they have one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def canonical_form(self, path: str, name: str) -> Expr:
        """Each projection by itself, beside where the packed one stands."""
        parent = path.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        rest = self.get_parameter(name).shape[1:]
        return Cat(tuple(Ref(f"{prefix}{part}.{name}", (rows, *rest)) for part, rows in self.parts.items()))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, parts={self.parts}, bias={self.bias is not None}"
