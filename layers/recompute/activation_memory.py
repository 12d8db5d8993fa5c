"""Activations saved for the backward pass, and recomputation of the others.

A norm's output or a gated product is cheap to recompute from something that is saved anyway. Such a tensor
carries a `Recipe`: the function and the inputs that produced it. While `keep_recipes()` is active, autograd's
saved-tensor hooks save the recipe of a tensor that has one, and the tensor itself otherwise. This works for
any consumer (a plain linear layer, LoRA, a quantised layer), repeats no matrix product, and rebuilds the
tensor with the same bits.

| level        | a layer saves                                             | and recomputes           |
|--------------|-----------------------------------------------------------|--------------------------|
| `all`        | everything                                                | nothing                  |
| `lean`       | input, q/k/v, attention output, residual, gate and up     | norms, the gated product |
| `mlp`        | input, q/k/v, attention output, the o_proj output         | also gate and up         |
| `checkpoint` | input                                                     | all but its last product |
| `tiled`      | input                                                     | the same, MLP in tiles   |
| `offload`    | nothing: its input is on the host, for long documents     | as `tiled`, but not that |
|              | also attention's output                                   | attention                |

A recomputed layer does not hold its norms either until the backward pass needs them (`run_again`). `tiled` is
for long sequences: an MLP runs over one tile at a time, and intermediates as wide as the MLP exist for one
tile only (layers/recompute/tiles.py). layers/recompute/offload.py moves inputs to the host. `auto` chooses a
level for each layer by the available memory: layers/memory/.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_models.kernels._ahead import as_it_is
from liger_models.kernels._dispatch import saving_for_one_pass
from liger_models.kernels.float8.copies import carried_rows, forget_rows
from liger_models.kernels.invariant.mode import as_in_this_pass
from liger_models.layers.projections.gathered import GatheredWeight
from liger_models.layers.projections.linear import Linear, has_hooks
from liger_models.layers.projections.low_rank import projection_of
from liger_models.layers.projections.packed_linear import SplitProjections

ActivationMemory = Literal["all", "lean", "mlp", "checkpoint", "tiled", "offload", "lean@host"]
LEVELS: tuple[ActivationMemory, ...] = ("all", "lean", "mlp", "checkpoint", "tiled", "offload")
# For some layers of a model: they save what `lean` does, and it is on the host between the two passes.
ON_HOST: ActivationMemory = "lean@host"
# Levels at which the whole layer is recomputed.
RERUN: tuple[ActivationMemory, ...] = ("checkpoint", "tiled", "offload")
# Levels at which the MLP runs in tiles.
TILED: tuple[ActivationMemory, ...] = ("tiled", "offload")


class Kept:
    """A tensor as autograd would have saved it: detached, and checked for in-place modification."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        # A leaf (a parameter) is kept as the object itself: sharding frameworks swap its data. Other tensors
        # are detached, since an output that referenced itself through its own node would never be freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            check_version(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


class Recipe:
    """How to recompute a tensor: `make(*inputs)`, without a graph. Valid for its current contents."""

    __slots__ = ("_inputs", "_made", "_make", "_output", "_version", "late")

    def __init__(
        self,
        output: Tensor,
        make: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        late: bool,
        deep: bool = False,
    ):
        forget = functools.partial(_RECIPES.pop, id(output))
        self._output = weakref.ref(output, lambda _: forget(None))
        self._version = output._version
        self._make, self.late = make, late
        self._inputs = tuple((_pack if deep else Kept)(tensor) for tensor in inputs)
        self._made: weakref.ref[Tensor] | None = None

    def replace_inputs(self, change: Callable[[Kept | Recipe], Any]) -> None:
        """Replace each kept input."""
        self._inputs = tuple(map(change, self._inputs))

    def makes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the output, unmodified."""
        return self._output() is tensor and tensor._version == self._version

    def get(self) -> Tensor:
        # Consecutive consumers (a frozen projection and its LoRA, say) share one rebuilt tensor while it
        # lives and is unmodified.
        made = self._made() if self._made is not None else None
        if made is None or made._version:
            with torch.no_grad():
                made = self._make(*(kept.get() for kept in self._inputs))
            self._made = weakref.ref(made)
        return made


# By the id of the output, while it lives. As an attribute of the output a recipe would be pickled with it.
_RECIPES: dict[int, Recipe] = {}


def carry_recipe(
    output: Tensor,
    make: Callable[..., Tensor],
    *inputs: Tensor,
    late: bool = False,
    deep: bool = False,
    frozen: bool = False,
) -> Tensor:
    """Record that `make(*inputs)` recomputes `output`, bit for bit. Returns `output`.

    `late` marks outputs that a layer's backward pass needs late: a recomputed layer then makes them again
    instead of holding them. With `deep` inputs that carry recipes are recomputed too, instead of being held.
    `frozen` outputs are float8 copies, which no gradient reaches, but gradients of other tensors need.
    """
    needed = output.requires_grad or (frozen and torch.is_grad_enabled())
    if needed and not torch.compiler.is_compiling():
        _RECIPES[id(output)] = Recipe(output, make, inputs, late, deep)
    return output


def carry_recipes(
    outputs: tuple[Tensor, ...],
    make: Callable[..., tuple[Tensor, ...]],
    *inputs: Tensor,
    late: bool = False,
    deep: bool = False,
    frozen: bool = False,
) -> tuple[Tensor, ...]:
    """The same of several outputs of `make(*inputs)`, which runs once for all that are asked for in a row."""
    waiting: dict[int, Tensor] = {}

    def made(number: int, *inputs: Tensor) -> Tensor:
        if number not in waiting:
            waiting.update(enumerate(make(*inputs)))
        return waiting.pop(number)

    for number, output in enumerate(outputs):
        make_one = functools.partial(made, number)
        carry_recipe(output, make_one, *inputs, late=late, deep=deep, frozen=frozen)
    return outputs


def carry_float8_recipe(
    x: Tensor, make: Callable[..., Tensor], *inputs: Tensor, late: bool = False
) -> Tensor:
    """The same of the float8 copy that x carries, if any: `make(*inputs)` makes x again, with its copy.

    Returns x.
    """
    rows = carried_rows(x)
    if rows is not None:
        carry_recipes(tuple(rows), functools.partial(_copy_made, make), *inputs, late=late, frozen=True)
    return x


def _copy_made(make: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    rows = carried_rows(make(*inputs))
    assert rows is not None
    return tuple(rows)


def output_is_ours(module: nn.Module) -> bool:
    """Whether the memory of the module's output may be reused: it is torch's linear layer, or ours, which
    saves none of it, with a plain weight, an unmodified forward and no hooks. A hook has seen the output; a
    wrapper, a subclass or another weight class may need it for its backward pass. Layers with low-rank paths
    answer for themselves.
    """
    if hasattr(module, "low_rank_projection"):
        return projection_of(module) is not None
    unchanged = type(module).forward in _LINEAR_FORWARDS and not has_hooks(module)
    # No parametrization either. For split projections the output is a private copy.
    weight = module._parameters.get("weight")
    plain = type(weight) in (nn.Parameter, GatheredWeight) or type(module) is SplitProjections
    return unchanged and plain


_LINEAR_FORWARDS = (nn.Linear.forward, Linear.forward, SplitProjections.forward)


def _pack(tensor: Tensor) -> Kept | Recipe:
    recipe = _RECIPES.get(id(tensor))
    return recipe if recipe is not None and recipe.makes(tensor) else Kept(tensor)


def _would_keep(tensor: Tensor) -> Tensor | Kept | Recipe:
    """Value that autograd saves for a tensor now: its recipe only while recipes are active."""
    return _pack(tensor) if recipes_are_kept() else tensor


def recipes_are_kept() -> bool:
    """Whether autograd saves recipes now: within `keep_recipes`, with no other hooks inside of it."""
    hooks = _callers_hooks(False)
    return hooks is not None and (hooks[0] is _pack or isinstance(hooks[0], _PackAs))


_unpack = operator.methodcaller("get")  # without a frame of Python's own, as it runs for every saved tensor


def keep_recipes(change: Callable[[Kept | Recipe], Any] | None = None) -> AbstractContextManager[Any]:
    """While active, autograd saves recipes in place of the tensors that carry one; or `change(kept)`, whose
    `get()` returns the tensor.

    Hooks set by the caller (`save_on_cpu`, torch's checkpoint) receive all tensors instead: offloaded, a
    recipe's inputs take as much memory as its output.
    """
    hooks = _callers_hooks(False)
    if torch.compiler.is_compiling() or (hooks is not None and hooks[0] is not as_it_is):
        return nullcontext()
    return saved_tensors_hooks(_pack if change is None else _PackAs(change), _unpack)


class _PackAs:
    """`_pack`, changed."""

    def __init__(self, change: Callable[[Kept | Recipe], Any]):
        self.change = change

    def __call__(self, tensor: Tensor) -> Any:
        return self.change(_pack(tensor))


_callers_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)`, save only its inputs, and run it again in the backward pass.

    Uses torch's checkpoint, which stops the second run at the last tensor that backward needs: a matrix
    product at the end of `function` is not repeated. Only autograd holds the inputs, so within another
    `recompute` they are freed with its first run. Without gradients, `function` just runs.

    Raises:
        RuntimeError: in the backward pass, if an input was modified in place since the first run began.
        Inputs that
            carry a recipe may be modified: they are recomputed.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if torch.compiler.is_compiling():
        return run_again(function, *args)
    tensors = [arg for arg in args if isinstance(arg, Tensor) and not arg.is_inference()]
    for tensor in tensors:
        forget_rows(tensor)  # the second run gets its arguments without
    versions = [_Version(tensor) for tensor in tensors if not isinstance(_would_keep(tensor), Recipe)]

    def run(*args: Any) -> Any:
        for version in versions:
            version.check()
        return function(*args)

    return run_again(run, *args)


class _Version:
    """The version counter of a tensor, without its memory: detached tensors share the counter, even when
    assigned other data.
    """

    __slots__ = ("expected", "shape", "witness")

    def __init__(self, tensor: Tensor):
        self.expected, self.shape = tensor._version, tensor.shape
        self.witness = tensor.detach()
        self.witness.data = tensor.new_empty(0)

    def check(self) -> None:
        check_version(self.shape, self.witness._version, self.expected)


def run_again(function: Callable[..., Any], *args: Any) -> Any:
    """torch's checkpoint, except that norm outputs of the second run are not held until the backward pass
    needs them, such as the one before attention during the MLP's and attention's backward passes.
    """
    options: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": _two_runs}
    if not torch.compiler.is_compiling() and is_being_recorded():
        options["preserve_rng_state"] = False  # it cannot be read; layers that draw are not recorded
    return checkpoint(as_in_this_pass(function), *args, use_reentrant=False, **options)


def is_being_recorded() -> bool:
    """Whether the kernels that are launched now become a CUDA graph: layers/model/recorded_layers.py."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _two_runs() -> tuple[_AboveTheHooks, _AboveTheHooks]:
    """Contexts of the first run, whose graph the backward pass uses, and of the second."""
    return _AboveTheHooks(lambda tensor: tensor), _AboveTheHooks(_PlaceOf.a_tensor)


class _AboveTheHooks:
    """While active, torch's checkpoint saves `seen_as(tensor)` in place of a tensor, and returns the tensor
    that it stands for. Reentrant, since a second backward pass runs a function again.
    """

    def __init__(self, seen_as: Callable[[Tensor], Any]):
        self.seen_as = seen_as
        self.hooks: list[saved_tensors_hooks] = []

    def __enter__(self) -> None:
        (pack, unpack), seen_as = _callers_hooks(False), self.seen_as
        pack_seen = saving_for_one_pass(lambda x: pack(seen_as(x)))
        hooks = saved_tensors_hooks(pack_seen, lambda packed: _made(unpack(packed)))
        hooks.__enter__()
        self.hooks.append(hooks)

    def __exit__(self, *failed: object) -> None:
        self.hooks.pop().__exit__(*failed)


class _PlaceOf:
    """Stand-in for a tensor in torch's checkpoint: the attributes it reads, and the recipe."""

    requires_grad = False

    def __init__(self, tensor: Tensor, recipe: Recipe):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.recipe = recipe

    @staticmethod
    def a_tensor(tensor: Tensor) -> Tensor | _PlaceOf:
        """The tensor itself, if it has no recipe or is needed soon; else its stand-in."""
        recipe = _RECIPES.get(id(tensor))
        late = recipe is not None and recipe.late and recipe.makes(tensor)
        return _PlaceOf(tensor, recipe) if recipe is not None and late else tensor

    def detach(self) -> _PlaceOf:
        return self


def _made(kept: Tensor | _PlaceOf) -> Tensor:
    return kept.recipe.get() if isinstance(kept, _PlaceOf) else kept


def check_version(shape: Sequence[int], found: int, expected: int) -> None:
    """Raise RuntimeError if a tensor of this shape has been modified since version `expected`."""
    if found != expected:
        raise RuntimeError(
            f"a tensor of shape {tuple(shape)} needed for the backward pass was modified in place: it "
            f"is at version {found}, expected {expected}. Change a copy of it, or change it after "
            "backward()."
        )


def set_levels(layers: Iterable[Any], levels: str | Sequence[str]) -> None:
    """Set what each of these layers saves for the backward pass: one level for all, or one per layer.

    Raises:
        ValueError: an unknown level, or the wrong number of levels.
    """
    layers = list(layers)
    for layer, level in zip(layers, parse_levels(levels, len(layers)), strict=True):
        layer.set_activation_memory(level)


def parse_levels(levels: str | Sequence[str], num_layers: int) -> tuple[ActivationMemory, ...]:
    """Expand one name for all layers, or a list of names, to one level per layer.

    Raises:
        ValueError: an unknown level, or a list whose length is not the number of layers.
    """
    per_layer = (levels,) * num_layers if isinstance(levels, str) else tuple(levels)
    for level in per_layer:
        if level not in (*LEVELS, ON_HOST):
            raise ValueError(
                f"unknown activation memory level {level!r}; choose one of {', '.join(LEVELS)}, or 'auto'; "
                f"for some layers also {ON_HOST!r}"
            )
    if len(per_layer) != num_layers:
        raise ValueError(
            f"got {len(per_layer)} activation memory levels for {num_layers} layers; pass one per layer"
        )
    return cast(tuple[ActivationMemory, ...], per_layer)
