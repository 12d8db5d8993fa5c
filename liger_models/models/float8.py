"""Choice of the layers that run in float8 (layers/projections/float8.py), by their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.errors import ConfigError
from liger_models.kernels import has_float8_products
from liger_models.layers.experts.moe import Experts
from liger_models.layers.experts.stored_experts import StoredExperts
from liger_models.layers.parts.norm import LigerRMSNorm
from liger_models.layers.projections.float8 import (
    RECIPES,
    Float8Recipe,
    Float8Settings,
    fits_float8,
    runs_in_float8,
)
from liger_models.layers.projections.gathered import (
    can_gather_in_float8,
    find_largest,
    gather_rows_in_float8,
    gathers_in_float8,
)
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.stored_linear import StoredLinear
from liger_models.layers.projections.ternary import is_ternary
from liger_models.layers.projections.weight_copies import WeightCopies

# A layer gains if the time that its products save exceeds the time of the casts. Per token, three products
# save 6 in out (1/690 - 1/1400) ps on a Hopper GPU (TFLOP/s in bfloat16 and float8), and casts move about 6
# bytes for each element of x and dy at 3.5 TB/s: 1.7 (in + out) ps. They break even at in out / (in + out) of
# 390; a layer must gain clearly.
SMALLEST_GAIN = 512


def set_float8(
    model: nn.Module, recipe: Float8Recipe | None, *, emulate: bool = False, all_sizes: bool = False
) -> dict[str, str]:
    """Run the linear layers of a decoder's layers, and of an image encoder's, in float8, or all in their own
    dtype again.

    Chosen by shape (`gains_from_float8`): layers that are too small to gain, and everything that is no linear
    layer (embeddings, the head, norms, routers, attention), keep their dtype. Stacked experts run in float8
    forward and for the gradients of their inputs, with scales for each row, while they have enough rows to
    gain; gradients of their weights are not quantised. Weights that are kept in quantised bits are decoded,
    and quantised to float8 for the product. May be called at any time, also between steps.

    Args:
        model: a model of this package, or a part of one.
        recipe: one of `RECIPES`; None: no layer.
        emulate: compute the products in float32 where float8 products are lacking, for tests.
        all_sizes: also choose layers that are too small to gain.

    Returns:
        The paths of the model's linear layers and stacked experts, with "float8" or the reason why not.

    Raises:
        ValueError: unknown recipe; or weights are gathered in float8, and the recipe has other scales.
    """
    settings = None if recipe is None else Float8Settings(recipe, emulate)
    _check_gathered(model, settings)
    found: dict[str, str] = {}
    for path, layer in _linears(model):
        sizes = layer.in_features, layer.out_features
        if is_ternary(layer):
            found[path] = "its operands are rounded to three values and 8 bits"
        elif not fits_float8(*sizes):
            found[path] = f"{sizes[0]} to {sizes[1]} is not a multiple of 16"
        elif not all_sizes and not gains_from_float8(*sizes):
            found[path] = f"{sizes[0]} to {sizes[1]} is too small to gain"
        else:
            found[path] = "float8" if settings else "not asked for"
        layer.float8 = settings if found[path] == "float8" else None
    for path, experts in _experts(model):
        _, hidden, inner = shape_of(experts.down_proj)
        if isinstance(experts, StoredExperts):
            found[path] = "its weights are kept in quantised bits"
        elif settings is not None and settings.one_scale:
            found[path] = "experts have a scale for each row, and tensorwise one for each matrix"
        elif not fits_float8(hidden, inner):
            found[path] = f"{hidden} to {inner} is not a multiple of 16"
        else:
            found[path] = "float8" if settings else "not asked for"
        experts.float8 = settings if found[path] == "float8" else None
    _let_norms_quantize(model)
    return found


@contextmanager
def keep_float8_weights(model: nn.Module) -> Iterator[None]:
    """Quantise each weight once in this context, instead of in each forward and backward pass, for the
    micro-batches of a step:

        with keep_float8_weights(model):
            for batch in micro_batches:
                model(**batch).loss.backward()
        optimizer.step()

    The bits are the same. The copies by rows and by columns take two bytes for each element of the linear
    layers in float8 until the context ends. A weight that is modified meanwhile is quantised again, unless it
    is modified through `.data`. Experts, weights stored in quantised bits, and weights that FSDP2 gathers are
    quantised as without it, and so are those of layers recorded as CUDA graphs.
    """
    found: dict[WeightCopies, list[Tensor]] = {}
    for settings, weight in _copied(model):
        found.setdefault(settings.copies, []).append(weight)
    with ExitStack() as stack:
        for copies, weights in found.items():
            stack.enter_context(copies.kept(weights))
        yield


def copied_bytes(model: nn.Module) -> int:
    """Bytes of the copies that `keep_float8_weights` keeps, by rows and by columns."""
    return 2 * sum(weight.numel() for _, weight in _copied(model))


def _copied(model: nn.Module) -> Iterator[tuple[Float8Settings, Tensor]]:
    for _, layer in _linears(model):
        if isinstance(layer, Linear) and layer.float8 is not None and type(layer.weight) is nn.Parameter:
            yield layer.float8, layer.weight


def gather_in_float8(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of layers that run in float8 as float8 numbers, quantised by the processes
    that own their rows: half the bytes of bfloat16.

    Sharded weights, gradients and the optimizer keep their dtype. Gathered are the trained weights whose rows
    the processes share equally; others as before. `from_hub` and `from_config` call this for models that they
    shard; otherwise call it after `fully_shard` and `set_float8`, before the first step.

    Args:
        model: sharded by `parallelize`, or torch's `fully_shard` on its layers.

    Returns:
        The paths of the layers.

    Raises:
        RuntimeError: FSDP2 has gathered the weights before, and cannot gather them in another form any more.
    """
    layers = {
        path: layer
        for path, layer in _linears(model)
        if type(layer).forward is Linear.forward and layer.float8 is not None and can_gather_in_float8(layer)
    }
    if not layers:
        return []
    module: Any
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state") and module._get_fsdp_state()._is_root is not None:
            raise RuntimeError(
                "the model has already run, and FSDP2 gathers its weights in their own dtype; call "
                "gather_in_float8 before the first step"
            )
    for layer in layers.values():
        gather_rows_in_float8(layer)
    if any(layer.float8.one_scale for layer in layers.values() if layer.float8 is not None):
        model.register_forward_pre_hook(_find_largest, prepend=True)  # before FSDP2's, which gathers
    return [*layers]


def _find_largest(model: nn.Module, args: object) -> None:
    find_largest([layer for _, layer in _linears(model) if gathers_in_float8(layer.weight)])


def _check_gathered(model: nn.Module, settings: Float8Settings | None) -> None:
    for path, layer in _linears(model):
        if layer.float8 is None or not gathers_in_float8(layer.weight):
            continue
        if settings is None or settings.one_scale != layer.float8.one_scale:
            wanted = None if settings is None else settings.recipe
            raise ValueError(
                f"the weight of {path} is gathered in float8 for the recipe {layer.float8.recipe}, found "
                f"{wanted!r}; expected a recipe with the same scales: choose it before the first step"
            )


def _let_norms_quantize(model: nn.Module) -> None:
    """Let norms write float8 copies where their width equals the width of a layer's input or output (the
    norm's gradient may be an output's). A copy that nobody reads costs a little time.
    """
    blocks = list(_blocks(model))
    chosen = [layer for block in blocks for layer in block.modules() if _in_rows(layer)]
    inputs, outputs = {layer.in_features for layer in chosen}, {layer.out_features for layer in chosen}
    experts = [part for block in blocks for part in block.modules() if isinstance(part, Experts)]
    inputs |= {shape_of(part.down_proj)[1] for part in experts if part.float8 is not None}
    for norm in (part for block in blocks for part in block.modules() if isinstance(part, LigerRMSNorm)):
        norm.float8_copy = norm.hidden_size in inputs
        norm.float8_gradient = norm.hidden_size in outputs


def _in_rows(layer: nn.Module) -> TypeGuard[Linear | StoredLinear]:
    return (
        isinstance(layer, Linear | StoredLinear) and layer.float8 is not None and not layer.float8.one_scale
    )


def float8_summary(model: nn.Module) -> str:
    """Say how many linear layers of the decoder layers run in float8, and the sizes of those that do not."""
    layers = [layer for _, layer in _linears(model)]
    chosen = [layer for layer in layers if runs_in_float8(layer)]
    others = {(layer.in_features, layer.out_features) for layer in layers if not runs_in_float8(layer)}
    summary = f"{len(chosen)} of {len(layers)} linear layers"
    if others:
        summary += f"; not in those from {', '.join(f'{a} to {b}' for a, b in sorted(others))}"
    return summary


def load_in_float8(model: Any, recipe: str) -> None:
    """Check that a model of this package can run in float8, and let it.

    Raises:
        ConfigError: unknown recipe, another dtype than bfloat16, or a device without float8 products.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"float8 must be one of {', '.join(RECIPES)}, found {recipe!r}")
    device: torch.device = model.device
    if device.type != "meta" and not has_float8_products(device):
        raise ConfigError(
            f"float8 is {recipe!r}, but the model is on {device}; expected an NVIDIA GPU of compute "
            "capability 9.0 or above, which has float8 products"
        )
    if model.dtype != torch.bfloat16:
        raise ConfigError(f"float8 is {recipe!r}, but the model is in {model.dtype}; pass dtype='bfloat16'")
    if model.spec.ternary is not None:
        raise ConfigError(
            f"float8 is {recipe!r}, but this model rounds the operands of its linear layers to three values "
            "and 8 bits (quantization_config); omit float8"
        )
    set_float8(model, recipe)  # type: ignore[arg-type]
    gather_in_float8(model)


def gains_from_float8(in_features: int, out_features: int) -> bool:
    """Whether a layer of these widths is clearly faster in float8."""
    return in_features * out_features >= SMALLEST_GAIN * (in_features + out_features)


def _linears(model: nn.Module) -> Iterator[tuple[str, Linear | StoredLinear]]:
    for part, layers in _layer_lists(model):
        for path, module in layers.named_modules(prefix=part):
            if type(module).forward in (Linear.forward, StoredLinear.forward):
                yield path, module


def _experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    for part, layers in _layer_lists(model):
        for path, module in layers.named_modules(prefix=part):
            if isinstance(module, Experts):
                yield path, module


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for _, layers in _layer_lists(model):
        yield from layers


def _layer_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for part, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and part.rpartition(".")[2] == "layers":
            yield part, layers
