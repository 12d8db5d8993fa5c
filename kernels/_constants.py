"""Tensors that depend only on numbers, computed once for a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Tensors = TypeVar("Tensors")


def cached_tensors(maxsize: int = 256) -> Callable[[Callable[P, Tensors]], Callable[P, Tensors]]:
    """Decorator that caches the tensors a function makes from hashable arguments.

    The cache holds tensors that serve any later call: they are made outside inference mode, since inference
    tensors cannot be saved for a backward pass. Under FakeTensorMode, whose tensors belong to that mode, and
    while torch compiles, the function runs again.

    Args:
        maxsize: number of results kept, as for `functools.lru_cache`.
    """

    def decorate(make: Callable[P, Tensors]) -> Callable[P, Tensors]:
        def outside_inference(*args: P.args, **kwargs: P.kwargs) -> Tensors:
            with torch.inference_mode(False):
                return make(*args, **kwargs)

        cached: Any = functools.lru_cache(maxsize=maxsize)(outside_inference)

        @functools.wraps(make)
        def tensors(*args: P.args, **kwargs: P.kwargs) -> Tensors:
            if torch.compiler.is_compiling() or type(torch.empty(0, device="cpu")) is not Tensor:
                return make(*args, **kwargs)
            return cached(*args, **kwargs)

        return tensors

    return decorate
