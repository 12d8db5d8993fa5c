"""How the parts of a layer are connected. A new topology is a new block, never a flag in an old one.

A block takes and returns the hidden states as two tensors, `x` and `residual`, whose sum is the residual
stream: the sum is taken inside the next norm, in one kernel. `residual` is None in front of the first block,
and behind blocks that change the sum itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.layers.activation_memory import ActivationMemory
from liger_models.layers.attention_backends import AttentionBackend
from liger_models.layers.latent_attention import LatentAttention
from liger_models.layers.mlp import GatedMLP, PlainMLP, make_mlp
from liger_models.layers.moe import MixtureOfExperts
from liger_models.layers.norm import Norm, make_norm
from liger_models.layers.self_attention import Attention
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec, BlockSpec, LatentAttentionSpec, MoESpec

Streams = tuple[Tensor, Tensor | None]


class Mixer(Protocol):
    """What a block asks of that which lets a token see others: attention, or a state."""

    def __call__(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Room for what it remembers of `batch` sequences of up to `max_length` tokens."""

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """What it keeps of a token for the backward pass."""


class Block(nn.Module):
    """A mixer and an MLP, by the types of their specs. What connects them is a subclass.

    Args:
        hidden_size: the width H of the hidden states.
        spec: the layer's parts.
        layer: its place in the model.
        attention: the attention backend.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.hidden_size, self.spec = hidden_size, spec
        self.self_attn: Mixer = MIXERS[type(spec.mixer)](hidden_size, spec.mixer, layer, attention)
        self.mlp: GatedMLP | PlainMLP | MixtureOfExperts
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MixtureOfExperts(hidden_size, spec.mlp)
        else:
            self.mlp = make_mlp(hidden_size, spec.mlp)
        self.activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        """x, residual [T, H] -> two tensors [T, H] whose sum is the residual stream behind the layer, or one
        and None.
        """
        raise NotImplementedError

    def set_activation_memory(self, level: ActivationMemory) -> None:
        """Choose what is kept for the backward pass, here and in the parts that have a choice."""
        parts: Iterable[Any] = self.modules()
        for part in parts:
            if hasattr(part, "activation_memory"):
                part.activation_memory = level

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes that the layer keeps for its backward pass, of each token, as on a GPU.

        What a level needs during the backward pass, one layer at a time, is not in it.
        """
        if level == "checkpoint":
            return itemsize * self.hidden_size + self._noted_bytes(itemsize)
        parts: Iterable[Any] = self.children()
        kept = (part.activation_bytes(level, itemsize) for part in parts if hasattr(part, "activation_bytes"))
        return sum(kept) + itemsize * self.hidden_size * self._branch_inputs(level)

    def _branch_inputs(self, level: ActivationMemory) -> int:
        """How many tensors [T, H] the branches keep of what they read, beside the norms' own inputs."""
        raise NotImplementedError

    def _noted_bytes(self, itemsize: int) -> int:
        """The router's choice, which the second run takes, and its logits, where the loss reads them."""
        if not isinstance(self.mlp, MixtureOfExperts):
            return 0
        spec = self.mlp.spec
        logits = spec.num_experts * (4 if spec.float32_router else itemsize)
        return self.mlp.router.decision_bytes + (logits if spec.has_router_loss else 0)

    def _scaled(self, x: Tensor) -> Tensor:
        """What a branch adds to the residual stream."""
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale


class PreNormBlock(Block):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.self_attn(x, sequences))
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self._scaled(self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class SandwichBlock(Block):
    """`h = x + norm(attention(norm(x))); y = h + norm(mlp(norm(h)))` (Gemma 2, arXiv:2408.00118): Gemma 2 and
    3, GLM-4.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self._scaled(self.post_attention_layernorm(self.self_attn(x, sequences)))
        x, residual = add_and_norm(self.pre_feedforward_layernorm, x, residual)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences))), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class ScaledSandwichBlock(SandwichBlock):
    """`y = s * sandwich(x)`, s a number that is stored and not trained (Gemma 4)."""

    layer_scalar: Tensor

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = super().forward(x, residual, sequences)
        assert residual is not None
        return (x + residual) * self.layer_scalar.to(x.dtype), None

    def reset_parameters(self, *_: Any) -> None:
        """A factor of one."""
        nn.init.ones_(self.layer_scalar)


class PostNormBlock(Block):
    """`h = x + norm(attention(x)); y = h + norm(mlp(h))` (OLMo 2, arXiv:2501.00656, section 3.2): OLMo 2 and
    3, EXAONE 4.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x = x if residual is None else x + residual
        x = x + self._scaled(self.post_attention_layernorm(self.self_attn(x, sequences)))
        return self._scaled(self.post_feedforward_layernorm(self.mlp(x, sequences))), x

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2  # the branches read the residual stream itself


class ParallelBlock(Block):
    """`n = norm(x); y = x + attention(n) + mlp(n)` (GPT-J, 2021; PaLM, arXiv:2204.02311): Cohere, Phi."""

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        self.input_layernorm = make_norm(hidden_size, spec.norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> Streams:
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        return self._scaled(self.self_attn(x, sequences) + self.mlp(x, sequences)), residual

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 1 if level == "all" else 0


MIXERS: dict[type, Callable[..., Mixer]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
}
BLOCKS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "sandwich": SandwichBlock,
    "scaled_sandwich": ScaledSandwichBlock,
    "post_norm": PostNormBlock,
    "parallel": ParallelBlock,
}


def add_and_norm(norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), or of x alone where there is nothing to add."""
    return (norm(x), x) if residual is None else norm(x, residual)
