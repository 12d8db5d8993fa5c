"""Benchmark cases: operations, their providers, and the least work.

A `Case` is one operation at one shape: random leaves (what autograd differentiates), upstream gradients, and
the providers. All providers of a case compute the same function of the same leaves. The truth is the eager
function in float64, or for losses over a vocabulary in chunks of tokens.

The least work counts every operand once per pass, however a provider computes: an operand needed by both the
forward and the backward pass is read twice, since a model's other layers run in between. Weights of norms,
labels and rotary tables are negligible and left out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Ceilings

Tensors = tuple[Tensor, ...]
PROVIDERS = ("ours", "liger-kernel", "torch.compile", "eager")
CPU_PROVIDERS = ("ours", "eager", "SDPA")  # the others need a GPU, or there compile for minutes
EPS = 1e-6


class Unavailable(Exception):
    """The provider does not support this: a note, not a failure."""


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Provider:
    """run(*leaves) returns one output or a tuple. A provider that needs its operands in another layout has
    `leaves`, which creates them from the case's (untimed), and `gradients`, which converts their gradients
    back (for the check only).
    """

    run: Callable[..., Tensor | Tensors]
    leaves: Callable[[Tensors], Tensors] = _same
    gradients: Callable[[Tensors], Tensors] = _same
    note: str = ""


@dataclass(frozen=True)
class Cost:
    """The least work of a pass: bytes that must move or, where they bind, FLOP of matrix products."""

    bytes: int = 0
    flops: int = 0

    def milliseconds(self, ceilings: Ceilings) -> float:
        """Time at the machine's limit."""
        return 1e3 * (self.flops / ceilings.matmul if self.flops else self.bytes / ceilings.copy)


@dataclass
class Case:
    leaves: Tensors
    upstream: Tensors
    providers: dict[str, Callable[[], Provider]]
    truth: Callable[[], Tensors]  # the true outputs, then the true gradients, in float32 at least
    training: Cost  # of the forward and the backward pass
    forward: Cost | None = None  # None: the forward pass alone is not measured

    def provider(self, name: str) -> Provider:
        """Raises Unavailable, ImportError or AttributeError where there is no such provider."""
        if name not in self.providers:
            raise Unavailable("has no such operation")
        return self.providers[name]()


def standard_case(
    leaves: Tensors,
    upstream: Tensors,
    ours: Callable[..., Tensor | Tensors],
    liger: Callable[[], Provider] | None,
    eager: Callable[..., Tensor | Tensors],
    *,
    training: Cost,
    forward: Cost | None = None,
    truth: Callable[[], Tensors] | None = None,
) -> Case:
    """A case of the four usual providers. Without `truth`, eager runs in float64."""
    providers = {
        "ours": lambda: Provider(ours),
        "torch.compile": partial(_compiled, eager),
        "eager": lambda: Provider(eager),
    }
    if liger is not None:
        providers["liger-kernel"] = liger
    truth = truth or partial(true_results, eager, leaves, upstream)
    return Case(leaves, upstream, providers, truth, training, forward)


def liger(
    name: str, call: Callable[..., Tensor | Tensors], module: str = "ops", **layout: Any
) -> Callable[[], Provider]:
    """liger-kernel's autograd function as a provider: `call(apply, *leaves)` calls it."""

    return lambda: Provider(partial(call, liger_function(name, module)), **layout)


def liger_function(name: str, module: str = "ops") -> Callable[..., Any]:
    """The `apply` of liger-kernel's autograd function. Raises ImportError or AttributeError without it."""
    # The autotuning of its experts takes minutes; it is asked for when the package is first imported.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name).apply


def _compiled(eager: Callable[..., Tensor | Tensors]) -> Provider:
    torch._dynamo.reset()
    return Provider(torch.compile(eager, dynamic=False))


def as_tuple(outputs: Tensor | Tensors) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def true_results(function: Callable[..., Tensor | Tensors], leaves: Tensors, upstream: Tensors) -> Tensors:
    """Outputs and gradients of the function in float64."""
    leaves = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    outputs = as_tuple(function(*leaves))
    gradients = torch.autograd.grad(outputs, leaves, tuple(g.double() for g in upstream))
    return tuple(t.detach().float() for t in (*outputs, *gradients))


@dataclass(frozen=True)
class Operation:
    """`group` is its file. `shapes` are measured, only the first with --quick. `small` is a batch of 1 x 512
    tokens, for the launch overhead; None if the device takes longer than the host. `tiny` is for a CPU.
    """

    name: str
    group: str
    dims: str
    build: Callable[[tuple[int, ...], torch.dtype, torch.device], Case]
    shapes: tuple[tuple[int, ...], ...]
    tiny: tuple[int, ...]
    small: tuple[int, ...] | None
    providers: tuple[str, ...]


REGISTRY: dict[str, Operation] = {}


def operation(name: str, dims: str, shapes, tiny, small=None, providers=PROVIDERS, **options):
    """Register the decorated build(shape, dtype, device, **options) -> Case."""

    def enter(build):
        group = build.__module__.rpartition(".")[2]
        build_case = partial(build, **options)
        REGISTRY[name] = Operation(name, group, dims, build_case, shapes, tiny, small, providers)
        return build

    return enter


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def normal(shape, dtype, device, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=scale)


def near_one(width: int, dtype, device) -> Tensor:
    return torch.empty(width, dtype=dtype, device=device).normal_(1.0, 0.1)
