"""Frozen experts whose matrices stay in the codes and scales of a quantised checkpoint.

The stacks of a layer are decoded one after another, in forward and again in backward, each for its product
(kernels/experts/moe_experts.py), and never kept.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from liger_models.convert.quantised.formats import CODES
from liger_models.convert.quantised.kept import Kept
from liger_models.kernels import StoredMatrices
from liger_models.kernels._dispatch import use_triton
from liger_models.layers.experts.moe import Experts, Matrices
from liger_models.layers.projections.low_rank_plan import product_dtype
from liger_models.layers.projections.stored_weight import decode, held, hold, part_name


class StoredExperts(Experts):
    """Experts over the bytes of quantised weights.

    Args:
        like: the dense experts, on the meta device, in the dtype to decode to. Their biases, and matrices
            that the checkpoint has dense, are taken over.
        kept: the stacks by their names in `like`.
    """

    def __init__(self, like: Experts, kept: Mapping[str, Kept]):
        nn.Module.__init__(self)
        self.spec, self.first, self.exchange = like.spec, like.first, like.exchange
        self.activation_memory, self.first_number = like.activation_memory, like.first_number
        self.kept_weights, self.decoded_dtype = dict(kept), like.down_proj.dtype
        for name in (self.first, "down_proj"):
            if name in kept:
                hold(self, name, kept[name])
            else:
                self.register_parameter(name, like.get_parameter(name))
        for name in (f"{self.first}_bias", "down_proj_bias"):
            setattr(self, name, getattr(like, name))
        parts = (part_name(name, role) for name in kept for role in kept[name].parts if role != CODES)
        self.stacked_vectors = (*like.stacked_vectors, *parts)

    def _runs_again(self, x: Tensor) -> bool:
        return super()._runs_again(x) or not use_triton(x)  # a CPU's products keep their matrices

    def _forward(self, *operands: Any) -> Tensor:
        if is_parametrized(self):
            raise TypeError(
                "an adapter adds to the matrices of experts that keep their quantised bits; adapt other "
                "layers, or load the model without keep_quantised"
            )
        return super()._forward(*operands)

    def _matrices(self, x: Tensor) -> tuple[Matrices, Matrices]:
        return self._stored(self.first, product_dtype(x)), self._stored("down_proj", product_dtype(x))

    def _stored(self, name: str, dtype: torch.dtype) -> Matrices:
        if name not in self.kept_weights:
            return self.get_parameter(name)
        shape, part = self.kept_weights[name].shape, held(self, name, self.kept_weights[name])[CODES]
        return StoredMatrices((len(part), *shape[1:]), dtype, functools.partial(self._decoded, name, dtype))

    def _decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        kept = self.kept_weights[name]
        with torch.no_grad():
            return decode(kept, held(self, name, kept), self.decoded_dtype, dtype)

    @torch.no_grad()
    def as_dense(self) -> Experts:
        """The same experts with decoded matrices."""
        with torch.device("meta"):
            plain = Experts(self.spec.intermediate_size, self.spec)  # of any width: all is replaced
        plain.activation_memory, plain.exchange = self.activation_memory, self.exchange
        plain.first_number = self.first_number
        for name in (self.first, "down_proj"):
            kept = name in self.kept_weights
            dense = self._decoded(name, self.decoded_dtype) if kept else self.get_parameter(name)
            plain.register_parameter(name, nn.Parameter(dense, requires_grad=False))
        for name in (f"{self.first}_bias", "down_proj_bias"):
            setattr(plain, name, getattr(self, name))
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in quantised bits"
