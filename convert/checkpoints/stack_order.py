"""Low-rank adapters of stacked experts in the order of the files.

    W_e + s B_e A_e                     lora_A [rank E, inputs], lora_B [outputs, rank E], column rank by rank

Stacks in a model are [E, outputs, inputs], gate before up. Some checkpoints order the rows in another way
(gpt-oss alternates gate and up), and an adapter's file follows them. If theirs are also transposed and their
model does not say so to PEFT (Llama 4), A and B are exchanged: W_e^T = A_e^T B_e^T.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.convert.checkpoints.expressions import Expr


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
