"""A provider bound to its operands: called, checked and timed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.operations.core import Case, Provider, Tensors, as_tuple


class Bound:
    """A provider with `copies` of a case's leaves and upstream gradients."""

    def __init__(self, case: Case, provider: Provider, copies: int = 1):
        self.provider = provider
        self.pristine = (*provider.leaves(tuple(t.detach() for t in case.leaves)), *case.upstream)
        self.sets = [tuple(t.clone() for t in self.pristine) for _ in range(copies)]
        self.num_leaves = len(self.pristine) - len(case.upstream)
        for tensors in self.sets:
            for leaf in tensors[: self.num_leaves]:
                leaf.requires_grad_()

    def forward(self, i: int = 0) -> Tensors:
        return as_tuple(self.provider.run(*self.sets[i][: self.num_leaves]))

    def train(self, i: int = 0) -> Tensors:
        """Outputs, then the leaves' gradients."""
        outputs = self.forward(i)
        leaves, upstream = self.sets[i][: self.num_leaves], self.sets[i][self.num_leaves :]
        return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, upstream))

    def forward_all(self) -> list[Tensors]:
        """One call on each copy."""
        return [self.forward(i) for i in range(len(self.sets))]

    def train_all(self) -> Tensors:
        """One call on each copy, then one backward pass through all, as through the layers of a model."""
        outputs = [output for outputs in self.forward_all() for output in outputs]
        leaves = [leaf for tensors in self.sets for leaf in tensors[: self.num_leaves]]
        upstream = [gradient for tensors in self.sets for gradient in tensors[self.num_leaves :]]
        return torch.autograd.grad(outputs, leaves, upstream)

    def results(self) -> Tensors:
        """Results of `train` in the case's layout; outputs as before the backward pass."""
        outputs = self.forward()
        found = [output.detach().clone() for output in outputs]
        leaves, upstream = self.sets[0][: self.num_leaves], self.sets[0][self.num_leaves :]
        return (*found, *self.provider.gradients(torch.autograd.grad(outputs, leaves, upstream)))

    @torch.no_grad()
    def restore(self) -> None:
        for tensors in self.sets:
            for tensor, pristine in zip(tensors, self.pristine, strict=True):
                tensor.copy_(pristine)

    def altered(self) -> bool:
        """Whether the provider has overwritten its operands."""
        pairs = zip(self.sets[0], self.pristine, strict=True)
        return not all(torch.equal(tensor, pristine) for tensor, pristine in pairs)


class Wrong(ValueError):
    """A provider's results are wrong."""


def check(found: Tensors, expected: Tensors, dtype: torch.dtype) -> float:
    """Largest relative error of an output or a gradient, in the mean square.

    Raises Wrong. After a few roundings with unit roundoff eps / 2, values differ from the truth by less than
    eps; an error up to four times that is not yet a wrong function.
    """
    limit = max(4 * torch.finfo(dtype).eps, 1e-5)
    error = max(_relative_error(a, b) for a, b in zip(found, expected, strict=True))
    if not error <= limit:  # also if it is nan
        raise Wrong(f"wrong: relative error {error:.1e}, expected at most {limit:.1e}")
    return error


def _relative_error(found: Tensor, true: Tensor) -> float:
    if found.shape != true.shape:
        raise Wrong(f"wrong: found {tuple(found.shape)}, expected {tuple(true.shape)}")
    difference = torch.linalg.vector_norm(found.float() - true.float())
    return (difference / torch.linalg.vector_norm(true.float())).item()
