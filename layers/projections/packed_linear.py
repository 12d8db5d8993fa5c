"""Several projections of one input in one matrix product.

    PackedLinear(H, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024})(x) = x @ cat(W_q, W_k, W_v)^T

The weights are concatenated by rows, in the order of the names, which are the checkpoint's. The packed form
is the fast one. `split_projections` gives each projection a linear layer of its own, under its own name and
over the same memory, for tools that look for layers by name; `fuse_projections` reverses it. The split layers
are those of the checkpoint: projections that the checkpoint packs, too, remain one layer. If their rows have
another order there (query, key and value head by head), the layer uses the checkpoint's order, and its
outputs are reordered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.convert.checkpoints.layout import plain_path
from liger_models.convert.checkpoints.rows import is_in_order, rows_of
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import WeightMap
from liger_models.layers.projections.float8 import fits_float8
from liger_models.layers.projections.in_place import child_table
from liger_models.layers.projections.linear import Linear, one_below_another
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of
from liger_models.layers.projections.packed_rows import layers_in_checkpoint, rows_in, rows_of_bias


class PackedLinear(Linear):
    """A linear layer whose output is the concatenation of `parts`.

    Args:
        in_features: the width of the input.
        parts: the widths of the projections, by name.
        bias: add biases.
        unbiased: projections that have none all the same; `bias` holds those of the others.
    """

    unbiased: tuple[str, ...] = ()

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = False,
        unbiased: tuple[str, ...] = (),
    ):
        super().__init__(in_features, sum(parts.values()), bias)
        if bias and unbiased:
            self.unbiased = unbiased
            biased = sum(width for name, width in parts.items() if name not in unbiased)
            self.bias = nn.Parameter(torch.zeros(biased))
        self._name_parts(parts)

    def _name_parts(self, parts: Mapping[str, int]) -> None:
        self.parts = dict(parts)
        for name in parts:
            self.add_module(name, _Part(name))

    def canonical_form(self, path: str, name: str) -> Expr:
        """Each projection as a tensor of its own, next to the packed one."""
        rest = shape_of(self.get_parameter(name))[1:]
        missing = self.unbiased if name == "bias" else ()
        held = {part: rows for part, rows in self.parts.items() if part not in missing}
        return Cat(tuple(Ref(f"{_sibling(path, part)}.{name}", (n, *rest)) for part, n in held.items()))

    def whole_bias(self) -> Tensor | None:
        """The bias of each output, [out_features], zeros where there is none."""
        if not self.unbiased:
            return self.bias
        widths = [0 if name in self.unbiased else width for name, width in self.parts.items()]
        pieces = zip(self.bias.split(widths), self.parts.values(), strict=True)
        return torch.cat([own if len(own) else own.new_zeros(width) for own, width in pieces])

    @property
    def heights(self) -> tuple[int, ...]:
        return tuple(self.parts.values())

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


class SplitProjections(nn.Module):
    """Replaces a split packed projection, and concatenates the outputs of its parts.

    The layers are the children of `owner`, including replacements by tools (adapters, quantised layers). If
    all layers with low-rank paths allow it, they run as one operation (layers/projections/low_rank.py).

    Args:
        owner: the module that holds the layers.
        parts: the packed projection's parts.
        layers: by name, the rows of the packed projection in each layer (`layers_in_checkpoint`).
        unbiased: parts without a bias.
    """

    def __init__(
        self,
        owner: nn.Module,
        parts: Mapping[str, int],
        layers: Mapping[str, Tensor],
        unbiased: tuple[str, ...] = (),
    ):
        super().__init__()
        self.unbiased = unbiased
        self._owner = (owner,)  # in a tuple, or it would become a child of its own child
        self.parts, self.layers = dict(parts), dict(layers)
        rows = torch.cat(list(layers.values()))
        self.is_sorted = is_in_order(rows)
        self._orders = {torch.device("cpu"): (rows.argsort(), rows)}

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of the parts]."""
        layers = self.linears()
        projections = [p for layer in layers if (p := projection_of(layer)) is not None and p.takes(x)]
        as_one = any(projection.adapters or projection.dense for projection in projections)
        if len(projections) == len(layers) and as_one:
            y = low_rank_linear(x, *projections)
        else:
            y = torch.cat([layer(x) for layer in layers], dim=-1)
        return y if self.is_sorted else _Reorder.apply(y, *self._order(y.device))

    def _order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._orders:
            order, back = self._orders[torch.device("cpu")]
            self._orders[device] = order.to(device), back.to(device)
        return self._orders[device]

    def linears(self) -> list[nn.Module]:
        """The layers, in order."""
        return [getattr(self._owner[0], name) for name in self.layers]

    def extra_repr(self) -> str:
        return ", ".join(self.layers)


class _Reorder(torch.autograd.Function):
    """Select the columns `order` of y; `back` is the inverse order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return y.index_select(-1, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(-1, ctx.back), None, None


@torch.no_grad()
def split_projections(model: nn.Module, weight_map: WeightMap) -> None:
    """Replace every packed projection of a model by the checkpoint's linear layers. These share its memory,
    except where the checkpoint has another order of rows.

    The layers' parameters are new objects, so call this before creating an optimizer, wrapper or adapter.

    Args:
        model: the owner of the projections.
        weight_map: from the checkpoint's tensors to the model's.

    Raises:
        ValueError: a packed projection is sharded, wrapped or has hooks.
    """
    layers = {
        id(module): layers_in_checkpoint(module.parts, weight_map[f"{path}.weight"])
        for path, module in packed_projections(model).items()
    }
    for owner, name, packed in list(_children(model, PackedLinear)):
        _check_plain([packed], PackedLinear, "split", "split before sharding and before adding adapters")
        rows = layers[id(packed)]
        if _is_one_layer(rows):
            weight = cast(nn.Parameter, packed.weight)
            _replace(owner, name, {name: _filled(Linear, weight, packed.bias, packed)})
            continue
        biases = [rows_of_bias(packed.parts, packed.unbiased, own) for own in rows.values()]
        linears = [
            _filled(
                Linear,
                _taken(packed.weight, own),
                None if packed.bias is None or of_bias is None else _taken(packed.bias, of_bias),
                packed,
            )
            for own, of_bias in zip(rows.values(), biases, strict=True)
        ]
        made = dict(zip(rows, linears, strict=True))
        split = SplitProjections(owner, packed.parts, rows, packed.unbiased)
        _replace(owner, name, {**made, name + IN_ORDER if name in made else name: split})


@torch.no_grad()
def fuse_projections(model: nn.Module) -> None:
    """Reverse `split_projections`: in place, or with a copy if layers are no longer contiguous in memory or
    have another order of rows.

    Raises:
        ValueError: a layer is no longer a plain linear layer, or the layers differ in dtype, device or
            requires_grad.
    """
    for owner, given, split in list(_children(model, SplitProjections)):
        name, linears = given.removesuffix(IN_ORDER), cast(list[Linear], split.linears())
        _check_plain(linears, Linear, "fused", "merge or unload adapters first")
        order = None if split.is_sorted else split._order(linears[0].weight.device)[0]
        weight = _join([cast(nn.Parameter, linear.weight) for linear in linears], order)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        packed = _filled(PackedLinear, weight, _join(biases, order) if biases else None, *linears)
        packed.unbiased = split.unbiased
        packed._name_parts(split.parts)
        for layer in split.layers:
            del child_table(owner)[layer]
        _replace(owner, given, {name: packed})


IN_ORDER = "_in_order"


def in_order(owner: nn.Module, name: str) -> nn.Module:
    """The projection of this name with its outputs in our order. Where the checkpoint has one layer of the
    same name in another order, the layer has the name when split, and its outputs are reordered next to it.
    """
    own: nn.Module = getattr(owner, name + IN_ORDER, None) or getattr(owner, name)
    return own


def packed_projections(model: nn.Module) -> dict[str, PackedLinear]:
    """List the packed projections of a model by path, without adapters around them."""
    return {
        path.removesuffix(".base_layer"): module
        for path, module in model.named_modules()
        if isinstance(module, PackedLinear)
    }


def packed_here_alone(model: nn.Module, weight_map: WeightMap) -> dict[str, dict[str, Tensor]]:
    """Map paths of packed projections that the checkpoint holds unpacked to the checkpoint's layers."""
    found = {
        path: layers_in_checkpoint(module.parts, weight_map[f"{path}.weight"])
        for path, module in packed_projections(model).items()
    }
    return {path: layers for path, layers in found.items() if not _is_one_layer(layers)}


def name_layers(model: nn.Module, weight_map: WeightMap) -> None:
    """Make the checkpoint's layer names resolve to placeholders, for tools that look for layers by name."""
    packed = packed_projections(model)
    for path, layers in packed_here_alone(model, weight_map).items():
        for name in layers.keys() - packed[path].parts.keys():
            packed[path].add_module(name, _Part(name))


def name_parts_as_stored(packed: PackedLinear, weight: Expr) -> None:
    """Give the parts the names of the checkpoint's layers, if each part is one of these.

    Args:
        packed: the projection.
        weight: the expression of its weight.
    """
    start, stored = 0, []
    for height in packed.parts.values():
        stored.append({ref.name for ref in rows_of(weight, start, start + height).refs()})
        start += height
    names = [name.split(".")[-2] for held in stored for name in held if name.endswith(".weight")]
    if len(set(names)) == len(stored) == sum(map(len, stored)):
        for part in packed.parts:
            del child_table(packed)[part]
        packed._name_parts(dict(zip(names, packed.parts.values(), strict=True)))


def _is_one_layer(layers: Mapping[str, Tensor]) -> bool:
    return len(layers) == 1 and is_in_order(next(iter(layers.values())))


def weight_map_of_parts(model: nn.Module, weight_map: WeightMap) -> dict[str, Expr]:
    """Derive the weight map of a model with some split projections from that of the packed model."""
    split = {  # also inside PEFT's wrapper for fully trained copies
        plain_path(path).replace(".original_module.", ".").removesuffix(IN_ORDER): module
        for path, module in model.named_modules()
        if isinstance(module, SplitProjections)
    }
    expressions: dict[str, Expr] = {}
    for name, packed in weight_map.items():
        path, _, kind = name.rpartition(".")
        if path not in split:
            expressions[name] = packed
            continue
        module = split[path]
        for layer, rows in module.layers.items():
            unbiased = module.unbiased if kind == "bias" else ()
            if (own := rows_of_bias(module.parts, unbiased, rows)) is not None:
                expressions[f"{_sibling(path, layer)}.{kind}"] = rows_in(packed, own)
    return expressions


class _Part(nn.Module):
    """A placeholder under a projection's name: without it, tools would silently skip the projection."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def forward(self, *args: object) -> Tensor:
        raise RuntimeError(repr(self))

    def __repr__(self) -> str:
        return f"{self._name}: packed with others; call model.split_projections() to have it as a layer"


Kind = TypeVar("Kind", bound=nn.Module)
Filled = TypeVar("Filled", bound=Linear)


def _children(model: nn.Module, kind: type[Kind]) -> Iterator[tuple[nn.Module, str, Kind]]:
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, kind):
                yield owner, name, child


def _filled(kind: type[Filled], weight: nn.Parameter, bias: nn.Parameter | None, *origins: Linear) -> Filled:
    """Build a linear layer from parameters: its constructor would allocate and draw random ones. Its products
    run as those of the layers that it replaces.
    """
    linear = kind.__new__(kind)
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    linear.register_parameter("bias", bias)
    linear.float8 = next((o.float8 for o in origins if o.float8 and fits_float8(*weight.shape)), None)
    linear.ternary = origins[0].ternary
    return linear


def _taken(packed: Tensor, rows: Tensor) -> nn.Parameter:
    """Make a parameter from rows of a packed one, and its gradient from theirs: over the same memory if the
    rows are contiguous.
    """

    def take(tensor: Tensor) -> Tensor:
        return (
            tensor[int(rows[0]) : int(rows[-1]) + 1] if is_in_order(rows) else tensor[rows.to(tensor.device)]
        )

    part = nn.Parameter(take(packed.detach()), packed.requires_grad)
    if packed.grad is not None:
        part.grad = take(packed.grad)
    return part


def _join(parts: Sequence[nn.Parameter], order: Tensor | None) -> nn.Parameter:
    """Join parameters into one, without a copy if they are contiguous in memory; row i of the result is row
    `order[i]` of the concatenation.
    """
    if len({(part.dtype, part.device, part.requires_grad) for part in parts}) > 1:
        raise ValueError(
            "projections that differ in dtype, device or requires_grad cannot be fused; make them equal first"
        )

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return _below(tensors) if order is None else torch.cat(list(tensors))[order]

    packed = nn.Parameter(join([part.detach() for part in parts]), parts[0].requires_grad)
    if any(part.grad is not None for part in parts):
        packed.grad = join([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])
    return packed


def _below(tensors: Sequence[Tensor]) -> Tensor:
    together = one_below_another(tensors)
    return torch.cat(list(tensors)) if together is None else together


def _check_plain(layers: Sequence[nn.Module], kind: type, what: str, remedy: str) -> None:
    for layer in layers:
        parameters = {type(p).__name__ for p in layer.parameters()}
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks)
        if type(layer) is not kind or parameters != {"Parameter"} or any(hooks):
            raise ValueError(
                f"a {type(layer).__name__} of {' and '.join(sorted(parameters))} cannot be {what}: it is "
                f"sharded, wrapped, quantised or has hooks; {remedy}"
            )


def _replace(owner: nn.Module, name: str, by: Mapping[str, nn.Module]) -> None:
    """Replace one module by several, keeping the order of a model's parameters."""
    table = child_table(owner)
    old = dict(table)
    mode = owner.training
    table.clear()
    for key, module in old.items():
        table.update(by if key == name else {key: module})
    for module in by.values():
        module.train(mode)


def _sibling(path: str, name: str) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
