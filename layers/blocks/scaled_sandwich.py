"""The sandwich block with a stored scale and an optional per-layer input, or also with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import add_and_norm, keys_and_values, own_input
from liger_models.layers.blocks.per_layer_input import PerLayerInput
from liger_models.layers.blocks.sandwich import SandwichBlock
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import BlockSpec, SharedAttentionSpec


class ScaledSandwichBlock(SandwichBlock):
    """`y = s * (h + norm(own(h)))`, with h the output of the sandwich block, s a stored, untrained number,
    and `own` an optional branch for the layer's own input (layers/blocks/per_layer_input.py) (Gemma 4).
    """

    supports: tuple[str, ...] = ("per_layer_input", "keys of another layer")
    layer_scalar: Tensor

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.register_buffer("layer_scalar", torch.ones(1))
        mixer, own = spec.mixer, spec.per_layer_input
        self.reads_keys = isinstance(mixer, SharedAttentionSpec)
        if isinstance(mixer, SharedAttentionSpec):
            self.reads = keys_and_values(mixer.keys_of)
        self.per_layer_input = None
        if own is not None:
            self.reads = (*self.reads, own_input(layer))
            self.per_layer_input = PerLayerInput(hidden_size, own)
            self.post_per_layer_input_norm = make_norm(hidden_size, spec.norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor
    ) -> tuple[Any, ...]:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        keys = read[:2] if self.reads_keys else (True,) if self.makes else ()
        attended = self.token_mixer(x, sequences, *keys)
        x, *made = attended if self.makes else (attended,)
        x = self._scaled(self.post_attention_layernorm(x))
        x, residual = add_and_norm(self.pre_feedforward_layernorm, x, residual)
        x = residual + self._scaled(self.post_feedforward_layernorm(self._feed(x, residual, sequences)))
        if self.per_layer_input is not None:
            x = x + self._scaled(self.post_per_layer_input_norm(self.per_layer_input(x, read[-1])))
        return (x * self.layer_scalar.to(x.dtype), None, *made)

    def _feed(self, x: Tensor, residual: Tensor, sequences: Sequences) -> Tensor:
        """Apply the MLP to x [T, H], the norm of `residual`."""
        return self.mlp(x, sequences)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return super()._branch_inputs(level) + (self.per_layer_input is not None)

    def _shared_kv_bytes(self, itemsize: int) -> int:
        own = self.per_layer_input
        kept = 0 if own is None else own.activation_bytes("checkpoint", itemsize)
        return super()._shared_kv_bytes(itemsize) + kept

    def reset_parameters(self, *_: Any) -> None:
        """Set the scale to one."""
        nn.init.ones_(self.layer_scalar)


class ScaledSandwichWithExpertsBlock(ScaledSandwichBlock):
    """The same with experts in parallel to the MLP, `norm(norm(mlp(norm(h))) + norm(experts(norm(h))))`; the
    router reads h itself (Gemma 4).
    """

    supports = (*ScaledSandwichBlock.supports, "experts")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if spec.experts is None:
            raise ValueError(f"layers of topology {spec.topology!r} have experts, and this spec has none")
        self.moe = MixtureOfExperts(hidden_size, spec.experts)
        self.post_feedforward_layernorm_1 = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm_2 = make_norm(hidden_size, spec.norm)

    def _feed(self, x: Tensor, residual: Tensor, sequences: Sequences) -> Tensor:
        dense = self.post_feedforward_layernorm_1(self.mlp(x, sequences))
        routed = self.moe(self.pre_feedforward_layernorm_2(residual), sequences, residual)
        return dense + self.post_feedforward_layernorm_2(routed)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        # Two norms share one input; the output of the experts' norm is kept.
        return super()._branch_inputs(level) - 1 + (1 if level == "all" else 0)
