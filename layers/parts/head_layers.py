"""Layers of a head before its projection onto the vocabulary."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from liger_models.convert.errors import UnsupportedModelError
from liger_models.layers.parts.mlp import plain_activation
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import recompute
from liger_models.layers.specs import HeadLayersSpec, ModelSpec


class HeadLayers(nn.Module):
    """`norm(act(W x + b))` (BERT's head; ModernBERT, arXiv:2412.13663). For the backward pass it keeps x.

    Args:
        hidden_size: the width H of hidden states.
        spec: the activation, the norm, and whether there is a bias.
    """

    def __init__(self, hidden_size: int, spec: HeadLayersSpec):
        super().__init__()
        self.dense = Linear(hidden_size, hidden_size, bias=spec.bias)
        self.activation = plain_activation(spec.activation)
        self.norm = make_norm(hidden_size, spec.norm)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]."""
        return cast(Tensor, recompute(self._run, hidden))

    def _run(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.activation(self.dense(hidden))))


def make_head_layers(hidden_size: int, spec: HeadLayersSpec | None) -> HeadLayers | None:
    """Create the layers that the spec describes; None if there are none."""
    return None if spec is None else HeadLayers(hidden_size, spec)


def refuse_head_layers(spec: ModelSpec) -> None:
    """Refuse to make a classifier of a model whose classifiers have such layers, too, as in transformers.

    Raises:
        UnsupportedModelError: it has such layers.
    """
    if spec.head_layers is not None:
        raise UnsupportedModelError(
            "classifiers of this family have further layers before their last one, which are not supported; "
            "load the model as a language model"
        )
