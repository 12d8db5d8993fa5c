"""Low-rank adapters of a native layer under the names of transformers' own layers, as PEFT's files have them.

    W + s B A  with rows R_i of W in transformers' layer i:   A_i = A,  B_i = B[R_i]

A layer that holds several of transformers' layers (query, key and value in one) gives each the same A and its
rows of B (and of DoRA's magnitude); a layer whose rows are in another order there has the rows of B in that
order. A layer whose weight is stored transposed (GPT-2's Conv1D) has the same A and B: they map inputs to
outputs, whatever the order of the weight. All of this moves elements, so the way back is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr, Permute, Ref
from liger_models.convert.checkpoints.rows import is_in_order, rows_in_checkpoint
from liger_models.convert.errors import CheckpointError

JOINED = "transformers joins their weights with those of other layers, whose adapters would have another rank"
NO_LAYER = "transformers holds their weights as plain parameters, which are not linear layers for PEFT"


@dataclass(frozen=True)
class AdapterLayers:
    """The layers of transformers' own model that a native layer consists of.

    Attributes:
        rows: names of the layers, with their rows of the native layer, in their order; None for all rows in
            the native order.
        transposed: their weights are stored transposed.
    """

    rows: Mapping[str, Tensor | None]
    transposed: bool = False

    @property
    def is_one(self) -> bool:
        """Whether the adapter is the same under another name."""
        return [*self.rows.values()] == [None]

    def write(self, kind: str, tensor: Tensor) -> dict[str, Tensor]:
        """Cut a tensor of the native adapter for the layers, by their names.

        Args:
            kind: "lora_A.weight", "lora_B.weight" or "lora_magnitude_vector".
            tensor: the tensor of that kind.
        """
        if kind == _SHARED:
            return {name: tensor.clone() for name in self.rows}
        return {
            name: tensor if rows is None else tensor[rows.to(tensor.device)]
            for name, rows in self.rows.items()
        }

    def read(self, kind: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Undo `write`.

        Raises:
            CheckpointError: the layers have different A.
        """
        first = next(iter(parts.values()))
        if kind == _SHARED:
            if any(not torch.equal(part, first) for part in parts.values()):
                raise CheckpointError(
                    f"the adapters of {', '.join(parts)} have different lora_A, but the model holds these as "
                    "one layer; merge the adapter (liger-models merge) and train new adapters"
                )
            return first
        whole = first.new_empty(sum(map(len, parts.values())), *first.shape[1:])
        for name, part in parts.items():
            rows = self.rows[name]
            whole[slice(None) if rows is None else rows.to(whole.device)] = part
        return whole


_SHARED = "lora_A.weight"


def adapter_layers(weight: Expr) -> AdapterLayers | str:
    """Return the layers of transformers' own model that consist of rows of a native one, or the reason why
    there are none.

    Args:
        weight: the native layer's weight as an expression over the tensors of transformers' own model.
    """
    names = [ref.name for ref in weight.refs()]
    if not all(name.endswith(_WEIGHT) for name in names):
        return NO_LAYER
    if isinstance(weight, Ref) or is_transposed(weight):
        return AdapterLayers({names[0].removesuffix(_WEIGHT): None}, not isinstance(weight, Ref))
    try:
        found = rows_in_checkpoint(weight)
    except ValueError:
        return JOINED
    whole = len(found) == 1 and all(map(is_in_order, found.values()))
    return AdapterLayers(
        {name.removesuffix(_WEIGHT): None if whole else rows for name, rows in found.items()}
    )


def is_transposed(weight: Expr) -> bool:
    """Whether a checkpoint stores a whole matrix transposed."""
    return (
        isinstance(weight, Permute)
        and isinstance(weight.part, Ref)
        and len(weight.shape) == 2
        and (weight.view, weight.order) == (weight.part.shape, (1, 0))
    )


_WEIGHT = ".weight"
