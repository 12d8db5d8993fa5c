"""How the parts of a layer are connected. A new topology is a new block, never a flag in an old one.

A block takes and returns the hidden states as two tensors, `x` and `residual`, whose sum is the residual
stream: the sum is taken inside the next norm, in one kernel. `residual` is None in front of the first block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.weight_map import Expr
from liger_models.layers.activation_memory import ActivationMemory, recompute
from liger_models.layers.attention_backends import AttentionBackend
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.self_attention import Attention
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import BlockSpec


@dataclass(frozen=True)
class BlockNames:
    """What a checkpoint calls the parts of a layer, below the layer's own prefix."""

    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"


class PreNormBlock(nn.Module):
    """`h = x + attention(norm(x)); y = h + mlp(norm(h))` (Xiong et al., 2020, arXiv:2002.04745): LLaMA,
    Mistral, Qwen.

    Args:
        hidden_size: the width H of the hidden states.
        spec: the layer's parts.
        layer: its place in the model.
        attention: the attention backend.
    """

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__()
        self.input_layernorm = LigerRMSNorm.from_spec(hidden_size, spec.norm)
        self.self_attn = Attention(hidden_size, spec.attention, layer, attention)
        self.post_attention_layernorm = LigerRMSNorm.from_spec(hidden_size, spec.norm)
        self.mlp = GatedMLP(hidden_size, spec.mlp)
        self.activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> the MLP's output and the residual stream before it, [T, H] each."""
        x, residual = add_and_norm(self.input_layernorm, x, residual)
        x = self.self_attn(x, sequences)
        if self.activation_memory == "mlp" and torch.is_grad_enabled():
            return recompute(self._feed_forward, x, residual)
        return self._feed_forward(x, residual)

    def _feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = add_and_norm(self.post_attention_layernorm, x, residual)
        return self.mlp(x), residual

    def weight_map(self, prefix: str, source: str, names: BlockNames) -> dict[str, Expr]:
        """`prefix` of the native names, `source` of the checkpoint's."""

        def at(name: str) -> str:
            return source + name

        return {
            **self.input_layernorm.weight_map(f"{prefix}input_layernorm.", at(names.input_norm)),
            **self.self_attn.weight_map(
                f"{prefix}self_attn.",
                at(names.q_proj),
                at(names.k_proj),
                at(names.v_proj),
                at(names.o_proj),
                at(names.sinks),
            ),
            **self.post_attention_layernorm.weight_map(
                f"{prefix}post_attention_layernorm.", at(names.post_attention_norm)
            ),
            **self.mlp.weight_map(
                f"{prefix}mlp.", at(names.gate_proj), at(names.up_proj), at(names.down_proj)
            ),
        }


BLOCKS: dict[str, type[PreNormBlock]] = {"pre_norm": PreNormBlock}


def add_and_norm(norm: LigerRMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); in front of the first block there is nothing to add."""
    return (norm(x), x) if residual is None else norm(x, residual)  # type: ignore[return-value]
