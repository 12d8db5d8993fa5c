"""Memory of modules for multi-token prediction (layers/model/mtp.py), which run after the last layer, at its
level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        gradients: of each module's parameters.
        head_gradient: of the gradient of the head's weight, which exists once for each pass through the head.
    """

    blocks: Sequence[LayerCosts] = ()
    stream: int = 0
    gradients: Sequence[int] = ()
    head_gradient: int = 0

    @staticmethod
    def of(model: Any, step: Step, itemsize: int) -> ModuleCosts:
        if model.mtp is None:
            return ModuleCosts()

        def gradient(module: Any) -> int:
            trained = () if step.lora_rank else (p for p in module.parameters() if p.requires_grad)
            return sum(map(own_bytes, trained))

        modules = list(model.mtp.values())
        return ModuleCosts(
            [LayerCosts.of(module.block, step, itemsize) for module in modules],
            step.tokens * model.layers[0].stream_bytes(itemsize),
            [gradient(module) // step.gpus for module in modules],
            gradient(model.lm_head),
        )

    def kept(self, level: ActivationMemory, count: int | None = None) -> int:
        """Bytes that the first `count` modules, or all, keep for the backward pass besides what their layers
        keep: the embeddings ahead, the input of the last norm, the hidden states from one module to the next,
        and at the level `all` both norms' outputs.
        """
        blocks = self.blocks[:count]
        streams = (4 if level == "all" else 2) * len(blocks) + max(0, len(blocks) - 1)
        # Their inputs are not moved to the host.
        of_blocks = (block.kept["tiled" if level == "offload" else level] for block in blocks)
        return sum(of_blocks) + streams * self.stream

    def at_the_loss(self, level: ActivationMemory) -> int:
        """Bytes at the last pass through the head: what is kept, the input's embeddings, and the gradients of
        the earlier passes.
        """
        if not self.blocks:
            return 0
        return self.kept(level) + self.stream + len(self.blocks) * (self.stream + self.head_gradient)

    def in_backward(self, level: ActivationMemory) -> Iterator[tuple[int, int]]:
        """Bytes in the backward pass of each module, without gradients of parameters, and the bytes
        of gradients that do not exist yet. The gradients of earlier passes through the head wait.
        """
        for i, block in enumerate(self.blocks):
            passes = (i + 1) * (self.stream + self.head_gradient)
            yield self.kept(level, i + 1) + block.transient[level] + passes, sum(self.gradients[:i])

    @property
    def waiting(self) -> int:
        """Bytes of the embeddings' gradient, which waits for that of the first layer."""
        return self.stream if self.blocks else 0
