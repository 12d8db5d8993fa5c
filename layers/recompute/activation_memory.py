"""What the forward pass keeps for the backward pass.

A norm's output or a gated product is cheap to make again from something that is kept anyway. Such a tensor
carries a `Recipe`: the function and the inputs that made it. While `keep_recipes()` is active, autograd's
saved-tensor hooks keep the recipe of a tensor that has one and the tensor itself otherwise. The consumer does
not matter (a plain linear layer, LoRA, a quantised layer), no matrix product is repeated, and the rebuilt
tensor has the same bits.

| level        | a layer keeps                                             | and computes again       |
|--------------|-----------------------------------------------------------|--------------------------|
| `all`        | everything                                                | nothing                  |
| `lean`       | input, q/k/v, attention output, residual, gate and up     | norms, the gated product |
| `mlp`        | input, q/k/v, attention output, the o_proj output         | also gate and up         |
| `checkpoint` | input                                                     | all but its last product |
| `tiled`      | input                                                     | the same, MLP in tiles   |
| `offload`    | nothing: its input is on the host                         | as `tiled`               |

A layer that runs again does not hold its norms either until the backward pass comes to them (`run_again`).
`tiled` is for long sequences: an MLP runs over one tile of them after the other, and what is as wide as the
MLP exists for a tile alone (layers/recompute/tiles.py). How inputs get to the host stands in
layers/recompute/offload.py. `auto` chooses a level for each layer by the memory that there is:
layers/memory/.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_models.layers.projections.linear import Linear, has_hooks
from liger_models.layers.projections.low_rank import projection_of
from liger_models.layers.projections.packed_linear import SplitProjections

ActivationMemory = Literal["all", "lean", "mlp", "checkpoint", "tiled", "offload"]
LEVELS: tuple[ActivationMemory, ...] = ("all", "lean", "mlp", "checkpoint", "tiled", "offload")
# Of a layer that runs again as a whole.
RERUN: tuple[ActivationMemory, ...] = ("checkpoint", "tiled", "offload")
# And of one whose MLP runs in tiles.
TILED: tuple[ActivationMemory, ...] = ("tiled", "offload")


class _Kept:
    """A tensor as autograd would have saved it: without its graph, and with the check that nobody wrote into
    it.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # A leaf (a parameter) is kept as the object itself: sharding frameworks swap the data under it.
        # Anything else is detached, since an output that held itself through its own node would never be
        # freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        check_version(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


class Recipe:
    """How to make a tensor again: `make(*inputs)`, without a graph. Right for the tensor as it is now."""

    __slots__ = ("_inputs", "_made", "_make", "_output", "_version", "late")

    def __init__(self, output: Tensor, make: Callable[..., Tensor], inputs: tuple[Tensor, ...], late: bool):
        forget = functools.partial(_RECIPES.pop, id(output))
        self._output = weakref.ref(output, lambda _: forget(None))
        self._version = output._version
        self._make, self.late = make, late
        self._inputs = tuple(_Kept(tensor) for tensor in inputs)
        self._made: weakref.ref[Tensor] | None = None

    def makes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the output, and nobody has written into it."""
        return self._output() is tensor and tensor._version == self._version

    def get(self) -> Tensor:
        # Two consumers in a row (a frozen projection and its LoRA, say) share one rebuilt tensor while it
        # lives and nobody writes into it.
        made = self._made() if self._made is not None else None
        if made is None or made._version:
            with torch.no_grad():
                made = self._make(*(kept.get() for kept in self._inputs))
            self._made = weakref.ref(made)
        return made


# By the id of the output, while it lives. On the output itself a recipe would be pickled along with it.
_RECIPES: dict[int, Recipe] = {}


def carry_recipe(output: Tensor, make: Callable[..., Tensor], *inputs: Tensor, late: bool = False) -> Tensor:
    """Note of `output` that `make(*inputs)` makes it again, bit for bit. Returns `output`.

    `late` is of what a layer's backward pass may come to late: in a layer that runs again, that makes it once
    more in place of holding it until then.
    """
    if not torch.compiler.is_compiling() and output.requires_grad:
        _RECIPES[id(output)] = Recipe(output, make, inputs, late)
    return output


def output_is_ours(module: nn.Module) -> bool:
    """Whether the memory of the module's output may be used again: it is torch's linear layer, or ours, which
    keeps none of it, of a plain weight, and nobody has changed how it runs or hooked into it. A hook has seen
    the output; a wrapper, a subclass or a weight of some other class may need it for its backward pass. A
    layer with low-rank paths says for itself when it is as simple.
    """
    if hasattr(module, "low_rank_projection"):
        return projection_of(module) is not None
    unchanged = type(module).forward in _LINEAR_FORWARDS and not has_hooks(module)
    # No parametrization either. Of split projections it is a copy that nobody else has seen.
    plain = type(module._parameters.get("weight")) is nn.Parameter or type(module) is SplitProjections
    return unchanged and plain


_LINEAR_FORWARDS = (nn.Linear.forward, Linear.forward, SplitProjections.forward)


def _pack(tensor: Tensor) -> _Kept | Recipe:
    recipe = _RECIPES.get(id(tensor))
    return recipe if recipe is not None and recipe.makes(tensor) else _Kept(tensor)


def _would_keep(tensor: Tensor) -> Tensor | _Kept | Recipe:
    """What autograd keeps of a tensor that is saved now: its recipe only while that is asked for."""
    hooks = _callers_hooks(False)
    return _pack(tensor) if hooks is not None and hooks[0] is _pack else tensor


def _unpack(packed: _Kept | Recipe) -> Tensor:
    return packed.get()


def keep_recipes() -> AbstractContextManager[Any]:
    """While active, autograd keeps recipes in place of the tensors that carry one.

    Hooks that the caller has set (`save_on_cpu`, torch's checkpoint) get all tensors instead: offloaded, a
    recipe's inputs take no less room than what it makes.
    """
    if torch.compiler.is_compiling() or _callers_hooks(False) is not None:
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


_callers_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)`, keep only its inputs, and run it again in the backward pass.

    torch's own checkpoint, which stops the second run at the last tensor that backward needs: a matrix
    product at the end of `function` is not repeated. Only autograd holds the inputs, so that within another
    `recompute` they are freed with its first run. Without gradients, `function` just runs.

    Raises:
        RuntimeError: in the backward pass, if an input was modified in place since the first run began. An
            input that carries a recipe may be: it is made again.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if torch.compiler.is_compiling():
        return run_again(function, *args)
    tensors = [arg for arg in args if isinstance(arg, Tensor) and not arg.is_inference()]
    versions = [_Version(tensor) for tensor in tensors if not isinstance(_would_keep(tensor), Recipe)]

    def run(*args: Any) -> Any:
        for version in versions:
            version.check()
        return function(*args)

    return run_again(run, *args)


class _Version:
    """The version counter of a tensor, without its memory: detached tensors share the counter, and keep it
    when they are given other data.
    """

    __slots__ = ("expected", "shape", "witness")

    def __init__(self, tensor: Tensor):
        self.expected, self.shape = tensor._version, tensor.shape
        self.witness = tensor.detach()
        self.witness.data = tensor.new_empty(0)

    def check(self) -> None:
        check_version(self.shape, self.witness._version, self.expected)


def run_again(function: Callable[..., Any], *args: Any) -> Any:
    """torch's checkpoint; but of what its second run makes, a norm's output is not kept until the backward
    pass comes to it: that in front of attention, while the MLP's backward pass and attention's run.
    """
    options: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": _two_runs}
    return checkpoint(function, *args, use_reentrant=False, **options)


def _two_runs() -> tuple[_AboveTheHooks, _AboveTheHooks]:
    """Around the first run, whose graph is that of the backward pass, and around the second."""
    return _AboveTheHooks(lambda tensor: tensor), _AboveTheHooks(_PlaceOf.a_tensor)


class _AboveTheHooks:
    """Within it torch's checkpoint keeps `seen_as(tensor)` in place of a tensor, and gives what that stands
    for. It may be entered again, as a second backward pass runs a function again.
    """

    def __init__(self, seen_as: Callable[[Tensor], Any]):
        self.seen_as = seen_as
        self.hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> None:
        (pack, unpack), seen_as = _callers_hooks(False), self.seen_as
        hooks = saved_tensors_hooks(lambda x: pack(seen_as(x)), lambda packed: _made(unpack(packed)))
        hooks.__enter__()
        self.hooks.append(hooks)

    def __exit__(self, *failed: object) -> None:
        self.hooks.pop().__exit__(*failed)


class _PlaceOf:
    """What torch's checkpoint keeps in place of a tensor: all that it asks of one, and its recipe."""

    requires_grad = False

    def __init__(self, tensor: Tensor, recipe: Recipe):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.recipe = recipe

    @staticmethod
    def a_tensor(tensor: Tensor) -> Tensor | _PlaceOf:
        """The tensor itself, if it has no recipe or is needed soon."""
        recipe = _RECIPES.get(id(tensor))
        late = recipe is not None and recipe.late and recipe.makes(tensor)
        return _PlaceOf(tensor, recipe) if recipe is not None and late else tensor

    def detach(self) -> _PlaceOf:
        return self


def _made(kept: Tensor | _PlaceOf) -> Tensor:
    return kept.recipe.get() if isinstance(kept, _PlaceOf) else kept


def check_version(shape: Sequence[int], found: int, expected: int) -> None:
    """Raise RuntimeError if a tensor of this shape has been written into since version `expected`."""
    if found != expected:
        raise RuntimeError(
            f"a tensor of shape {tuple(shape)} needed for the backward pass was modified in place: it "
            f"is at version {found}, expected {expected}. Change a copy of it, or change it after "
            "backward()."
        )


def set_levels(layers: Iterable[Any], levels: str | Sequence[str]) -> None:
    """Choose what each of these layers keeps for the backward pass: one level for all, or one a layer.

    Raises:
        ValueError: an unknown level, or the wrong number of them.
    """
    layers = list(layers)
    for layer, level in zip(layers, parse_levels(levels, len(layers)), strict=True):
        layer.set_activation_memory(level)


def parse_levels(levels: str | Sequence[str], num_layers: int) -> tuple[ActivationMemory, ...]:
    """One level a layer, from one name for all of them or a list of names.

    Raises:
        ValueError: an unknown level, or a list whose length is not the number of layers.
    """
    per_layer = (levels,) * num_layers if isinstance(levels, str) else tuple(levels)
    for level in per_layer:
        if level not in LEVELS:
            raise ValueError(
                f"unknown activation memory level {level!r}; choose one of {', '.join(LEVELS)}, or 'auto'"
            )
    if len(per_layer) != num_layers:
        raise ValueError(
            f"got {len(per_layer)} activation memory levels for {num_layers} layers; give one a layer"
        )
    return cast(tuple[ActivationMemory, ...], per_layer)
