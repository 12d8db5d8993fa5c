"""Low-rank adapters in the form of PEFT's files, under the names of transformers' own modules.

    W + s B A  with rows R_i of W in transformers' layer i:   A_i = A,  B_i = B[R_i]

A layer that holds several of transformers' layers (query, key and value in one) gives each the same A and its
rows of B (and of DoRA's magnitude); a layer whose rows are in another order there has the rows of B in that
order. A layer whose weight is stored transposed (GPT-2's Conv1D) has the same A and B: they map inputs to
outputs, whatever the order of the weight. All of this moves elements, so the way back is exact.

    W_e + s B_e A_e  of stacked experts:  lora_A [rank E, inputs], lora_B [outputs, rank E], rank by rank

Stacks in a model are [E, outputs, inputs], gate before up. Some checkpoints order the rows in another way
(gpt-oss alternates gate and up), and an adapter's file follows them. If theirs are also transposed and their
model does not say so to PEFT (Llama 4), A and B are exchanged: W_e^T = A_e^T B_e^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class StackOrder:
    """Order of a stack's adapter in files.

    Attributes:
        outputs, inputs: our output index [2 I] and input index [H] at each position of the file's stack.
        exchanged: files hold adapters of the transposed matrices, so A and B are exchanged.
        experts: number of experts.
    """

    outputs: Tensor
    inputs: Tensor
    exchanged: bool
    experts: int

    def write(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert our A [E r, inputs] and B [outputs, r E] to the order of files."""
        a, b = a.index_select(1, self.inputs.to(a.device)), b.index_select(0, self.outputs.to(b.device))
        return self._exchange(a, b) if self.exchanged else (a, b)

    def read(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Convert A and B from the order of files to ours."""
        if self.exchanged:
            a, b = self._exchange(a, b)
        back = self.inputs.argsort(), self.outputs.argsort()
        return a.index_select(1, back[0].to(a.device)), b.index_select(0, back[1].to(b.device))

    def _exchange(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        other_a = b.unflatten(1, (-1, self.experts)).permute(2, 1, 0).flatten(0, 1)
        other_b = a.unflatten(0, (self.experts, -1)).permute(2, 1, 0).flatten(1)
        return other_a, other_b


def stack_order(forms: Iterable[Expr], says_transposed: bool) -> StackOrder | None:
    """Return the order of a stack's adapter in files; None if it is ours, or each expert is stored alone.

    Args:
        forms: the stack as an expression over the tensors of each form of checkpoint.
        says_transposed: transformers' own experts declare to PEFT that their stacks are [E, inputs, outputs].
    """
    whole = next((form for form in forms if len(list(form.refs())) == 1), None)
    if whole is None:
        return None
    orders, places = [], []
    for dim in range(1, len(whole.shape)):
        numbers = torch.arange(whole.shape[dim], device="cpu").view(
            [-1 if i == dim else 1 for i in range(len(whole.shape))]
        )
        ((_, _, _, view),) = whole.places(numbers.expand(whole.shape))  # a view: allocates nothing
        orders.append(view[tuple(slice(None) if stride else 0 for stride in view.stride())].flatten())
        places.append(next(i for i, stride in enumerate(view.stride()) if stride))
    exchanged = places != sorted(places) and not says_transposed
    if all(order.equal(torch.arange(len(order), device="cpu")) for order in orders) and not exchanged:
        return None
    return StackOrder(orders[0], orders[-1], exchanged, whole.shape[0])
