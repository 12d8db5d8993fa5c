"""Eager execution of whole models under torch.compile.

A model's work depends on data: it reads documents, ids and labels of the batch, and saves recipes in place of
activations (layers/recompute/activation_memory.py). Traced, it would lose its checks, run the kernels' plain
twins, and be larger and slower than eager. Compiled code therefore breaks the graph before a model and
continues after it, with identical results. Individual kernels and layers can be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R], why: str | None = None) -> Callable[P, R]:
    """Make `function`, and everything it calls, run outside of torch.compile's graphs; `why` is the message
    under fullgraph=True, by default that of whole models.
    """
    # torch's internal decorator: the public one imports the compiler, which takes seconds.
    outside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        torch._dynamo.graph_break(msg=why or _WHY)  # gives fullgraph=True a clear message
        return outside(*args, **kwargs)

    return run


_WHY = (
    "a model of liger_models runs eagerly, uncompiled: its kernels are fused by hand, and its checks and "
    "activation memory cannot be traced. Compile without fullgraph=True, or do not compile it."
)
