"""The block with attention and an MLP whose weights several layers share.

    t = W mlp(norm(attention(norm([x, e]))));   y = x + mixer(norm(x + t))       e: the first layer's input

Attention and MLP belong to the model, and a layer refers to them. Each layer that uses them adds low-rank
products of its own to their first projections, and its own keys and values to a cache:

    gate, up = n W_gu^T + (n A_l^T) B_l^T                                        l: the layer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.blocks.block import EMBEDDINGS, Block, Streams, add_and_norm
from liger_models.layers.parts.mlp import make_mlp
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec, BlockSpec, MLPSpec, RecurrentSpec, SharedSpec


class SharedTransformer(nn.Module):
    """Attention and an MLP without residual connections, with adapters for each layer that uses them
    (Glorioso et al., 2024, arXiv:2411.15242, figure 2).

    Args:
        hidden_size: the width H of the hidden states.
        spec: of a layer that uses these weights.
        uses: of all such layers.
        attention: the attention backend.
    """

    is_shared = True  # in transformers each layer has modules of its own over these weights

    def __init__(
        self, hidden_size: int, spec: BlockSpec, uses: Sequence[SharedSpec], attention: AttentionBackend
    ):
        super().__init__()
        attn, mlp, shared = spec.second_mixer, spec.mlp, uses[0]
        assert isinstance(attn, AttentionSpec)
        assert isinstance(mlp, MLPSpec)
        numbers = [str(use.use) for use in uses]
        self.rank, self.uses = shared.rank, len(uses)

        def adapters(inputs: int, outputs: int) -> nn.ModuleDict:
            return nn.ModuleDict({number: _adapter(inputs, shared.rank, outputs) for number in numbers})

        self.input_layernorm = make_norm(2 * hidden_size, spec.norm)
        self.self_attn = Attention(hidden_size, attn, shared.first, attention, 2 * hidden_size)
        self.adapts_attention = shared.adapts_attention
        if shared.adapts_attention:
            self.q_adapters = adapters(2 * hidden_size, attn.q_size)
            self.k_adapters = adapters(2 * hidden_size, attn.kv_size)
            self.v_adapters = adapters(2 * hidden_size, attn.v_size)
        self.pre_ff_layernorm = make_norm(hidden_size, spec.norm)
        self.mlp = make_mlp(hidden_size, mlp)
        self.gate_up_adapters = adapters(hidden_size, (2 if mlp.gated else 1) * mlp.intermediate_size)

    def forward(
        self,
        x: Tensor,
        embeddings: Tensor,
        sequences: Sequences,
        layer: int,
        use: SharedSpec,
        level: ActivationMemory,
    ) -> Tensor:
        """x, embeddings [T, H] -> [T, H], for the given layer, at its level of activation memory."""
        self.self_attn.activation_memory = self.mlp.activation_memory = level
        x = self.input_layernorm(torch.cat([x, embeddings], dim=-1))
        attended: Any = self.self_attn(x, sequences, layer=layer, added=self._of_attention(x, use))
        return self.mlp(self.pre_ff_layernorm(attended), added=self.gate_up_adapters[str(use.use)])

    def _of_attention(self, x: Tensor, use: SharedSpec) -> Tensor | None:
        if not self.adapts_attention:
            return None
        by_use = (self.q_adapters, self.k_adapters, self.v_adapters)
        return torch.cat([adapters[str(use.use)](x) for adapters in by_use], dim=-1)

    def parts(self, use: SharedSpec) -> tuple[nn.Module, ...]:
        """The modules that one use runs."""
        parts = [self.input_layernorm, self.self_attn, self.pre_ff_layernorm, self.mlp]
        by_use = [self.gate_up_adapters]
        if self.adapts_attention:
            by_use += [self.q_adapters, self.k_adapters, self.v_adapters]
        return (*parts, *(adapters[str(use.use)] for adapters in by_use))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, uses={self.uses}"


def _adapter(inputs: int, rank: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Linear(inputs, rank, bias=False), Linear(rank, outputs, bias=False))


class SharedTransformerBlock(Block):
    """`y = x + mixer(norm(x + t))`, where t comes from attention and an MLP that several layers share
    (Zamba: Glorioso et al., 2024, arXiv:2405.16712, equation 6).
    """

    reads = (EMBEDDINGS,)
    supports = ("second_mixer", "shared")
    needs = ("mixer", "second_mixer", "mlp", "shared")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        parts: list[Any] = [*spec.mixers, spec.mlp]
        kinds = [type(part).__name__ for part in parts]
        expected: list[Any] = [RecurrentSpec, AttentionSpec, MLPSpec]
        if not all(isinstance(part, kind) for part, kind in zip(parts, expected, strict=True)):
            raise ValueError(f"the parts are {kinds}; expected a mixer with a state, attention and an MLP")
        self.layer = layer
        self.linear = Linear(hidden_size, hidden_size, bias=False)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self._shared: tuple[SharedTransformer, ...] = ()  # in a tuple: the module is the model's

    def share(self, shared: SharedTransformer) -> None:
        """Use these weights from now on."""
        self._shared = (shared,)

    @property
    def use(self) -> SharedSpec:
        """Which weights the layer uses, and its number among their users."""
        assert self.spec.shared is not None
        return self.spec.shared

    def forward(
        self, x: Tensor, residual: Tensor | None, sequences: Sequences, embeddings: Tensor
    ) -> Streams:
        stream = x if residual is None else x + residual
        (shared,) = self._shared
        x = shared(stream, embeddings, sequences, self.layer, self.use, self.activation_memory)
        x = add_and_norm(self.input_layernorm, self.linear(x), stream)[0]
        return self._scaled(self.token_mixer(x, sequences)), stream

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        size = (batch, max_length, device, dtype)
        return self._shared[0].self_attn.new_cache(*size), self.token_mixer.new_cache(*size)

    @property
    def borrowed(self) -> tuple[nn.Module, ...]:
        return self._shared[0].parts(self.use) if self._shared else ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token that the layer keeps, including those of the weights that it shares: the inputs of
        both adapters' second matrices in addition to the parts' own.
        """
        kept = super().activation_bytes(level, itemsize)
        if level in RERUN:
            return kept
        parts: Any = [part for part in self.borrowed if hasattr(part, "activation_bytes")]
        kept += sum(part.activation_bytes(level, itemsize) for part in parts)
        return kept + itemsize * self.use.rank * (3 * self.use.adapts_attention + (level != "mlp"))

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 5 if level == "all" else 1  # the norms' outputs, one of them twice as wide; the input of W


def make_shared(
    layers: Sequence[Block], hidden_size: int, attention: AttentionBackend = "auto"
) -> nn.ModuleDict | None:
    """The weights that layers share, by the first layer that uses them; None if none do.

    Raises:
        ValueError: the first layer is not one of the users, or users do not have equal parts and different
            numbers.
    """
    users: dict[int, list[SharedTransformerBlock]] = {}
    for layer in layers:
        if isinstance(layer, SharedTransformerBlock):
            users.setdefault(layer.use.first, []).append(layer)
    made = {}
    for first, blocks in users.items():
        uses = [block.use for block in blocks]
        alike = {(*block.spec.mixers[1:], block.spec.mlp, block.spec.norm) for block in blocks}
        alike_use = {(use.rank, use.adapts_attention) for use in uses}
        numbers = {use.use for use in uses}
        if blocks[0].layer != first or max(len(alike), len(alike_use)) > 1 or len(numbers) < len(uses):
            raise ValueError(
                f"layers {[block.layer for block in blocks]} share the weights of layer {first}; expected it "
                "to be the first of them, the same attention, MLP, norms and ranks in all, and a number for "
                "each"
            )
        shared = SharedTransformer(hidden_size, blocks[0].spec, uses, attention)
        for block in blocks:
            block.share(shared)
        made[str(first)] = nn.ModuleDict({"shared_transformer": shared})
    return nn.ModuleDict(made) if made else None
