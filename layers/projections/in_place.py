"""Changes of a module in place: of its class, and of its table of children.

Other modules, hooks, optimizers and wrappers hold references to a module, and would keep the old one if a
copy took its place. Every such change is made by these functions, where a debugger can stop at it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def change_class(module: Any, kind: type[nn.Module]) -> None:
    """Give a module another class, which finds the attributes that it needs in the module."""
    module.__class__ = kind


def child_table(module: nn.Module) -> dict[str, Any]:
    """The children of a module by name, to read or to change.

    Unlike `named_children`, it holds a module under each of its names. Unlike `add_module`, it accepts names
    that the module's class has too.
    """
    return module._modules
