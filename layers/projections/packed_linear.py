"""Several projections of one input in one matrix product.

    PackedLinear(H, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024})(x) = x @ cat(W_q, W_k, W_v)^T

The weights lie below one another, in the order of the names, which are those of a checkpoint. Fused is the
fast form. `split_projections` gives each projection a linear layer of its own, under its own name and over
the same memory, for tools that look for layers by name; `fuse_projections` turns that back. Layers then are
those of the checkpoint: what it holds packed as well stays one layer, and where its rows lie in another order
there (query, key and value head by head) the layer has them in that order, and its outputs are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.expressions import Cat, Expr, Ref
from liger_models.convert.checkpoints.layout import plain_path
from liger_models.convert.checkpoints.rows import is_in_order, rows_in_checkpoint, rows_of
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import WeightMap
from liger_models.layers.projections.in_place import child_table
from liger_models.layers.projections.linear import Linear, one_below_another
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of


class PackedLinear(Linear):
    """A linear layer whose output is those of `parts`, side by side.

    Args:
        in_features: the width of the input.
        parts: the widths of the projections, by name.
        bias: whether they have one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False):
        super().__init__(in_features, sum(parts.values()), bias)
        self._name_parts(parts)

    def _name_parts(self, parts: Mapping[str, int]) -> None:
        self.parts = dict(parts)
        for name in parts:
            self.add_module(name, _Part(name))

    def canonical_form(self, path: str, name: str) -> Expr:
        """Each projection by itself, beside where the packed one stands."""
        rest = shape_of(self.get_parameter(name))[1:]
        names = (f"{_beside(path, part)}.{name}" for part in self.parts)
        return Cat(tuple(Ref(n, (rows, *rest)) for n, rows in zip(names, self.parts.values(), strict=True)))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class SplitProjections(nn.Module):
    """Stands where the packed projection stood, and puts the outputs of its parts side by side.

    The layers are the children of `owner`, whatever takes their places there (adapters, quantised layers).
    Layers with low-rank paths run as one operation (layers/projections/low_rank.py), if all of them can.

    Args:
        owner: the module that holds the layers.
        parts: the packed projection's parts.
        layers: by name, the rows of the packed projection that each has (`layers_in_checkpoint`).
    """

    def __init__(self, owner: nn.Module, parts: Mapping[str, int], layers: Mapping[str, Tensor]):
        super().__init__()
        self._owner = (owner,)  # in a tuple, or it would become a child of its own child
        self.parts, self.layers = dict(parts), dict(layers)
        rows = torch.cat(list(layers.values()))
        self.is_sorted = is_in_order(rows)
        self._orders = {torch.device("cpu"): (rows.argsort(), rows)}

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of the parts]."""
        layers = self.linears()
        projections = [p for layer in layers if (p := projection_of(layer)) is not None and p.takes(x)]
        if len(projections) == len(layers) and any(projection.adapters for projection in projections):
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
        """The layers, in their order."""
        return [getattr(self._owner[0], name) for name in self.layers]

    def extra_repr(self) -> str:
        return ", ".join(self.layers)


class _Reorder(torch.autograd.Function):
    """The columns `order` of y, whose inverse is `back`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return y.index_select(-1, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(-1, ctx.back), None, None


def layers_in_checkpoint(packed: PackedLinear, weight: Expr) -> dict[str, Tensor]:
    """The layers in which a checkpoint holds a packed projection: by name, the rows of the packed one that
    are the layer's, in the checkpoint's order.

    Parts that share no checkpoint tensor are layers of their own. What the checkpoint holds together is one,
    named as there.

    Args:
        packed: the projection.
        weight: the expression of its weight.
    """
    held: list[tuple[list[str], set[str]]] = []  # parts, and the checkpoint tensors that hold them
    start, bounds = 0, {}
    for part, height in packed.parts.items():
        bounds[part] = start, start + height
        parts, names = [part], {ref.name for ref in rows_of(weight, *bounds[part]).refs()}
        for other in [other for other in held if other[1] & names]:
            held.remove(other)
            parts, names = [*other[0], *parts], other[1] | names
        held.append((parts, names))
        start += height
    found = {}
    for parts, names in held:
        if len(parts) == 1:
            found[parts[0]] = torch.arange(*bounds[parts[0]], device="cpu")
            continue
        (name,) = names
        try:
            rows = rows_in_checkpoint(weight)[name]
        except ValueError:  # it has the whole in another form, such as transposed
            rows = torch.arange(start, device="cpu")
        found[name.split(".")[-2]] = rows
    return found


@torch.no_grad()
def split_projections(model: nn.Module, weight_map: WeightMap) -> None:
    """Make every packed projection of a model the linear layers that a checkpoint has, over the same memory
    but for those whose rows lie in another order there.

    Their parameters are new objects, so this comes before an optimizer, a wrapper or an adapter is made.

    Args:
        model: what holds them.
        weight_map: of its tensors, over those of the checkpoint.

    Raises:
        ValueError: a packed projection is sharded, wrapped or hooked into.
    """
    layers = {
        id(module): layers_in_checkpoint(module, weight_map[f"{path}.weight"])
        for path, module in packed_projections(model).items()
    }
    for owner, name, packed in list(_children(model, PackedLinear)):
        _check_plain([packed], PackedLinear, "split", "split before sharding and before adding adapters")
        rows = layers[id(packed)]
        if _is_one_layer(rows):
            weight = cast(nn.Parameter, packed.weight)
            _replace(owner, name, {name: _filled(Linear, weight, packed.bias)})
            continue
        linears = [
            _filled(
                Linear, _taken(packed.weight, own), None if packed.bias is None else _taken(packed.bias, own)
            )
            for own in rows.values()
        ]
        made = dict(zip(rows, linears, strict=True))
        _replace(owner, name, {**made, name: SplitProjections(owner, packed.parts, rows)})


@torch.no_grad()
def fuse_projections(model: nn.Module) -> None:
    """Turn `split_projections` back: in place, or with a copy where layers no longer lie below one another,
    or their rows in another order.

    Raises:
        ValueError: a layer is no longer a plain linear layer, or the layers differ in what they are.
    """
    for owner, name, split in list(_children(model, SplitProjections)):
        linears = cast(list[Linear], split.linears())
        _check_plain(linears, Linear, "fused", "merge or unload adapters first")
        order = None if split.is_sorted else split._order(linears[0].weight.device)[0]
        weight = _join([cast(nn.Parameter, linear.weight) for linear in linears], order)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        packed = _filled(PackedLinear, weight, _join(biases, order) if biases else None)
        packed._name_parts(split.parts)
        for layer in split.layers:
            del child_table(owner)[layer]
        _replace(owner, name, {name: packed})


def packed_projections(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed projections of a model by their paths, without adapters around them."""
    return {
        path.removesuffix(".base_layer"): module
        for path, module in model.named_modules()
        if isinstance(module, PackedLinear)
    }


def packed_here_alone(model: nn.Module, weight_map: WeightMap) -> dict[str, dict[str, Tensor]]:
    """The packed projections that a checkpoint has otherwise, by their paths, with the layers that it has."""
    found = {
        path: layers_in_checkpoint(module, weight_map[f"{path}.weight"])
        for path, module in packed_projections(model).items()
    }
    return {path: layers for path, layers in found.items() if not _is_one_layer(layers)}


def name_layers(model: nn.Module, weight_map: WeightMap) -> None:
    """Let tools that look for a layer of the checkpoint by its name find where it is packed."""
    packed = packed_projections(model)
    for path, layers in packed_here_alone(model, weight_map).items():
        for name in layers.keys() - packed[path].parts.keys():
            packed[path].add_module(name, _Part(name))


def _is_one_layer(layers: Mapping[str, Tensor]) -> bool:
    return len(layers) == 1 and is_in_order(next(iter(layers.values())))


def weight_map_of_parts(model: nn.Module, weight_map: WeightMap) -> dict[str, Expr]:
    """The weight map of a model, some of whose packed projections are split, from that of the fused one."""
    split = {  # also within what PEFT keeps beside the copy that it trains
        plain_path(path).replace(".original_module.", "."): module.layers
        for path, module in model.named_modules()
        if isinstance(module, SplitProjections)
    }
    expressions: dict[str, Expr] = {}
    for name, packed in weight_map.items():
        path, _, kind = name.rpartition(".")
        if path not in split:
            expressions[name] = packed
            continue
        for layer, rows in split[path].items():
            expressions[f"{_beside(path, layer)}.{kind}"] = _rows_in(packed, rows)
    return expressions


def _rows_in(packed: Expr, rows: Tensor) -> Expr:
    """The expression of some rows of a packed tensor: a tensor of the checkpoint, where it is one."""
    if is_in_order(rows):
        return rows_of(packed, int(rows[0]), int(rows[-1]) + 1)
    held = rows_in_checkpoint(packed)
    for ref in packed.refs():
        if torch.equal(held[ref.name], rows):
            return Ref(ref.name, ref.shape)
    ends = [*(rows.diff() != 1).nonzero().flatten().add(1).tolist(), len(rows)]
    runs = zip([0, *ends[:-1]], ends, strict=True)
    return Cat(tuple(rows_of(packed, int(rows[a]), int(rows[b - 1]) + 1) for a, b in runs))


class _Part(nn.Module):
    """Where a tool looks for a projection by its name, and would otherwise pass over it in silence."""

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


def _filled(kind: type[Filled], weight: nn.Parameter, bias: nn.Parameter | None) -> Filled:
    """A linear layer of these parameters: its constructor would make others, and random numbers for them."""
    linear = kind.__new__(kind)
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear


def _taken(packed: Tensor, rows: Tensor) -> nn.Parameter:
    """A parameter of some rows of a packed one, and of those of its gradient: over the same memory, if they
    are neighbours.
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
    """One parameter over these, which lie below one another, or a copy of them; its rows are `order` of
    theirs.
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
                f"sharded, wrapped, quantised or hooked into; {remedy}"
            )


def _replace(owner: nn.Module, name: str, by: Mapping[str, nn.Module]) -> None:
    """Put modules in the place of one, so that the order of a model's parameters stays."""
    table = child_table(owner)
    old = dict(table)
    mode = owner.training
    table.clear()
    for key, module in old.items():
        table.update(by if key == name else {key: module})
    for module in by.values():
        module.train(mode)


def _beside(path: str, name: str) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
