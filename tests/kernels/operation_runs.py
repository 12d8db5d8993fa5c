"""An operation under test, its operands, and runs of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Operation:
    run: Callable  # on the tensors of `shapes`; returns a tensor or a tuple of tensors
    eager: Callable  # the same in plain PyTorch, as a model that uses no kernels computes it in its own dtype
    shapes: Callable[[int, int], list[tuple[int, ...]]]  # operands' shapes, given rows and width
    tables: int = 0  # number of operands at the end that are constants: rotary tables, or a teacher
    widest: int = 2**31  # largest supported width, such as 256 for a head


def documents_of(x, short=None):
    """Boundaries of documents of four tokens; the last may be shorter. If `short` is given, only as many
    tokens at the end are in such documents, and those before in documents of 4,096.
    """
    start = 0 if short is None else max(0, len(x) - short)
    long_ones = torch.arange(0, start, 4096, device=x.device)
    return torch.cat([long_ones, torch.arange(start, len(x) + 5, 4, device=x.device).clamp(max=len(x))])


def make_inputs(op: Operation, rows: int, width: int, dtype=torch.float32, device="cpu") -> list[Tensor]:
    shapes = op.shapes(rows, width)
    operands = len(shapes) - op.tables
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes[:operands]]
    return inputs + [torch.randn(shape, device=device) for shape in shapes[operands:]]


def outputs_of(function, inputs) -> tuple[Tensor, ...]:
    outputs = function(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def run_with_gradients(function, inputs, gradients=None, **options):
    """Outputs, the gradients of all operands that require one, and the upstream gradients."""
    outputs = outputs_of(function, inputs)
    if gradients is None:
        gradients = [torch.randn_like(output) for output in outputs]
    needed = [x for x in inputs if x.requires_grad]
    return outputs, torch.autograd.grad(outputs, needed, gradients, **options), gradients


def in_float64(tensors) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


def copies(tensors) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def transposed(x):
    if x.dim() == 0:
        return x.detach().clone()
    return x.detach().mT.contiguous().mT if x.dim() > 1 else torch.stack([x.detach(), x.detach()], -1)[:, 0]


def cut_from_wider(x):  # memory with gaps between rows, which do not begin at multiples of 16 bytes
    if x.dim() == 0:
        return x.detach().clone()
    other = torch.randn_like(x)
    return torch.cat([other[..., :1], x.detach(), other], -1)[..., 1 : x.shape[-1] + 1]
