"""Modules whose parameters get no initial values."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class WithoutInitialisation(TorchFunctionMode):
    """Skip the random initialisation of parameters that are about to be overwritten.

    On the meta device it would cost nothing in itself, but torch imports its compiler for it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)
