"""Per-layer inputs in addition to the residual stream (per-layer embeddings in Gemma 3n and Gemma 4, Google
DeepMind, 2025 and 2026).

    for all L layers at once, from a token's id and its embedding e [H]: inputs = (norm(e W^T / sqrt(H)) +
        table[id] sqrt(P)) / sqrt(2)       [L, P], a norm for each layer
    table[0] for ids beyond the table
    layer l, after its MLP, with the residual stream h: h + norm(project(act(gate(h)) * inputs[l]))
        the outer norm is the block's

The table [V, L P] is most of a small model's parameters, but a token reads only one row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.layers.parts.mlp import gated_product
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe, recompute
from liger_models.layers.specs import LayerNormSpec, NormSpec, PerLayerInputSpec


class PerLayerInputs(nn.Module):
    """The inputs of all layers.

    Args:
        hidden_size: the width H of the embeddings.
        num_layers, size: the number of layers L, and the width P of their inputs.
        vocab_size: the number of ids.
        norm: applied to the projected embeddings.
        padding_idx: the row whose lookup has no gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        num_layers: int,
        size: int,
        vocab_size: int,
        norm: NormSpec | LayerNormSpec,
        padding_idx: int | None = None,
    ):
        super().__init__()
        self.size, self.scale = size, hidden_size**-0.5
        width = num_layers * size
        self.embed_tokens_per_layer = TokenEmbedding(vocab_size, width, size**0.5, padding_idx)
        self.per_layer_model_projection = Linear(hidden_size, width, bias=False)
        self.per_layer_projection_norm = make_norm(size, norm)

    def forward(self, ids: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """ids [T], embeddings [T, H] -> the inputs of the L layers, [T, P] each."""
        projected = (self.per_layer_model_projection(embeddings) * self.scale).unflatten(-1, (-1, self.size))
        ids = torch.where(ids < self.embed_tokens_per_layer.num_embeddings, ids, 0)
        looked_up = self.embed_tokens_per_layer(ids).unflatten(-1, (-1, self.size))
        inputs = (self.per_layer_projection_norm(projected).to(looked_up.dtype) + looked_up) * 2**-0.5
        return inputs.unbind(1)


class PerLayerInput(nn.Module):
    """The branch of one layer, without its norm: `project(act(gate(h)) * input)`.

    Args:
        hidden_size: the width H of the residual stream.
        spec: the width P of the input, and the activation.
    """

    activation_memory: ActivationMemory = "lean"

    def __init__(self, hidden_size: int, spec: PerLayerInputSpec):
        super().__init__()
        self.spec, self.gated_product = spec, gated_product(spec.activation)
        self.per_layer_input_gate = Linear(hidden_size, spec.size, bias=False)
        self.per_layer_projection = Linear(spec.size, hidden_size, bias=False)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [T, H], the layer's own input [T, P] -> [T, H]."""
        if self.activation_memory == "mlp" and torch.is_grad_enabled():
            return recompute(self._forward, x, own)
        return self._forward(x, own)

    def _forward(self, x: Tensor, own: Tensor) -> Tensor:
        gate = self.per_layer_input_gate(x)
        own = own.to(gate.dtype)  # autocast may leave embeddings in a wider dtype
        product = self.gated_product(gate, own)
        return self.per_layer_projection(carry_recipe(product, self.gated_product, gate, own))

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token: the layer's own input, the norm's input and statistic, and the gate and the
        product if the level keeps them.
        """
        kept = {"all": 4, "lean": 3}.get(level, 2)
        return kept * itemsize * self.spec.size + 4

    def extra_repr(self) -> str:
        return f"activation={self.spec.activation!r}"
