"""Operations that read no tensor with a recipe: autograd saves their tensors without a call of Python.

Most tensors that a layer saves have no recipe, but hooks are called for every one, when it is saved and when
it is read again, which takes the host about as long as a small operation. So operations whose operands have
none, such as norms and attention, run outside of the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from liger_models.layers.recompute.activation_memory import none_has_a_recipe

_autograd = torch._C._autograd

T = TypeVar("T")


def without_recipes(operation: Callable[..., T], *operands: Any, **options: Any) -> T:
    """`operation(*operands, **options)`, outside of the hooks of `keep_recipes` unless an operand has a
    recipe.
    """
    if not none_has_a_recipe(*operands):
        return operation(*operands, **options)
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    _autograd._pop_saved_tensors_default_hooks()
    try:
        return operation(*operands, **options)
    finally:
        _autograd._push_saved_tensors_default_hooks(*hooks)
