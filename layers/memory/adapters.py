"""What adapters keep and need of a token beside a layer's own activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from liger_models.layers.memory.step import Step
from liger_models.layers.projections.packed_linear import PackedLinear

# PEFT's own forward of DoRA and other variants, which runs again in the backward pass, makes up to three
# tensors as wide as the input and six as wide as the output, in float32 (counted with PEFT 0.21).
_INPUTS, _OUTPUTS = 3, 6


@dataclass(frozen=True)
class AdapterCosts:
    """Of the adapters in a layer.

    Attributes:
        columns: of the low-rank paths' t = x A^T, which are kept where a layer does not run again.
        last, front, mixer: bytes for each token that PEFT's own forward of one layer needs, the most of the
            MLP's last product, of those in front of it, and of the mixer's.
        matrices: bytes that it needs whatever the number of tokens.
    """

    columns: int = 0
    last: int = 0
    front: int = 0
    mixer: int = 0
    matrices: int = 0

    @staticmethod
    def of(layer: nn.Module, step: Step) -> AdapterCosts:
        """Of the adapters that a layer has, or will have in this step."""
        columns, matrices, work = 0, 0, {"last": 0, "front": 0, "mixer": 0}
        for name, width, height, rank, own_forward in _adapted(layer, step):
            columns += rank
            if own_forward:
                place = "mixer" if not name.startswith("mlp.") else "last" if "down_proj" in name else "front"
                work[place] = max(work[place], 4 * (_INPUTS * width + _OUTPUTS * height))
                if step.dora:  # the norms of W + s B A, which PEFT makes of a unit matrix
                    matrices = max(matrices, 4 * width * (width + 3 * height))
        return AdapterCosts(columns, work["last"], work["front"], work["mixer"], matrices)


def _adapted(layer: nn.Module, step: Step) -> Iterator[tuple[str, int, int, int, bool]]:
    """Name, inputs, outputs and rank of each adapted linear layer, and whether PEFT's own forward runs it."""
    for name, module in layer.named_modules():
        if step.lora_rank:
            if isinstance(module, nn.Linear):
                heights = [module.out_features]
                if isinstance(module, PackedLinear):
                    heights = list(module.parts.values())
                for height in heights:
                    yield name, module.in_features, height, 0 if step.dora else step.lora_rank, step.dora
        elif hasattr(module, "low_rank_projection"):
            own: Any = module
            found = own.low_rank_projection()
            rank = 0 if found is None else sum(adapter.a.shape[0] for adapter in found.adapters)
            yield name, own.in_features, own.out_features, rank, found is None
