"""In-place changes of a module's class and of its table of children.

Other modules, hooks, optimizers and wrappers hold references to a module, and would keep the old one if a
copy replaced it. Every such change goes through these functions, where a debugger can stop.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def change_class(module: Any, kind: type[nn.Module]) -> None:
    """Give a module another class, which finds the attributes it needs on the module."""
    module.__class__ = kind


def child_table(module: nn.Module) -> dict[str, Any]:
    """Return the children of a module by name, to read or to modify.

    Unlike `named_children`, the table lists a module under each of its names. Unlike `add_module`, it accepts
    names that the module's class also has.
    """
    return module._modules
