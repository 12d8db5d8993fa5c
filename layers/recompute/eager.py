"""Whole models run as they are, under torch.compile too.

What a model does lies outside a compiler's view: it reads documents, ids and labels off the batch, and keeps
recipes in place of activations (layers/recompute/activation_memory.py). Traced, its checks would be lost, its
kernels' twins would run, and it would keep more and be slower than uncompiled. So compiled code breaks off
before a model and goes on behind it, and the results are those of the model alone. The kernels by themselves,
and single layers, can be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let `function`, and all that it calls, run outside whatever torch.compile compiles."""
    # Torch's own decorator, for what it calls itself. The public one loads the compiler, which takes seconds.
    outside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        torch._dynamo.graph_break(msg=_WHY)  # alone it would do, but for what fullgraph=True says then
        return outside(*args, **kwargs)

    return run


_WHY = (
    "a model of liger_models runs as it is, uncompiled: its kernels are fused by hand, and its checks and "
    "activation memory lie outside a graph. Compile without fullgraph=True, or do not compile it."
)
