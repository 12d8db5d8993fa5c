"""Memory of modules for multi-token prediction (layers/model/mtp.py), which run after the last layer, at its
level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.own_parts import own_bytes
from liger_models.layers.memory.step import Step
from liger_models.layers.recompute.activation_memory import ActivationMemory


@dataclass(frozen=True)
class ModuleCosts:
    """Bytes of all modules of a model.

    Attributes:
        blocks: costs of their layers.
        stream: of a tensor [T, H].
        head_gradient: of the gradient of the head's weight, which exists once for each pass through the head.
    """

    blocks: Sequence[LayerCosts]
    stream: int
    head_gradient: int

    @staticmethod
    def of(model: Any, step: Step, itemsize: int) -> ModuleCosts:
        if model.mtp is None:
            return ModuleCosts((), 0, 0)
        blocks = [LayerCosts.of(module.block, step, itemsize) for module in model.mtp.values()]
        trained = model.lm_head.weight.requires_grad and not step.lora_rank
        gradient = own_bytes(model.lm_head.weight) if trained else 0
        return ModuleCosts(blocks, step.tokens * model.layers[0].stream_bytes(itemsize), gradient)

    def kept(self, level: ActivationMemory) -> int:
        """Bytes kept for the backward pass: the embeddings ahead and the input of the last norm, at the level
        `all` also the hidden states and both norms' outputs, besides what the layers keep.
        """
        streams = 5 if level == "all" else 2
        return sum(block.kept[level] + streams * self.stream for block in self.blocks)

    def at_the_loss(self, level: ActivationMemory) -> int:
        """Bytes at the last pass through the head: what is kept, the input's embeddings, and the gradients of
        the earlier passes.
        """
        if not self.blocks:
            return 0
        return self.kept(level) + self.stream + len(self.blocks) * (self.stream + self.head_gradient)

    def in_backward(self, level: ActivationMemory) -> int:
        """Bytes in the backward pass of the last module, with the gradient of the decoder's output."""
        work = max((block.transient[level] for block in self.blocks), default=0)
        return self.kept(level) + work + self.stream
