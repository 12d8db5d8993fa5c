"""Several projections of one input in one matrix product.

    PackedLinear(H, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024})(x) = x @ cat(W_q, W_k, W_v)^T

The weights lie below one another, in the order of the names, which are those of a checkpoint. Fused is the
fast form. `split_projections` gives each projection a linear layer of its own, under its own name and over
the same memory, for tools that look for layers by name; `fuse_projections` turns that back. Layers then are
those of the checkpoint: what it holds packed as well stays one layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.layout import plain_path
from liger_models.convert.checkpoints.shards import shape_of
from liger_models.convert.checkpoints.weight_map import Cat, Expr, Ref, WeightMap, rows_of
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

    The parts are the children of `owner`, whatever takes their places there (adapters, quantised layers).
    Parts with low-rank paths run as one operation (layers/projections/low_rank.py), if all of them can.
    """

    def __init__(self, owner: nn.Module, parts: Mapping[str, int]):
        super().__init__()
        self._owner = (owner,)  # in a tuple, or it would become a child of its own child
        self.parts = dict(parts)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of the parts]."""
        parts = self.linears()
        projections = [p for part in parts if (p := projection_of(part)) is not None and p.takes(x)]
        if len(projections) == len(parts) and any(projection.adapters for projection in projections):
            return low_rank_linear(x, *projections)
        return torch.cat([part(x) for part in parts], dim=-1)

    def linears(self) -> list[nn.Module]:
        """The parts, in their order."""
        return [getattr(self._owner[0], part) for part in self.parts]

    def extra_repr(self) -> str:
        return ", ".join(self.parts)


@torch.no_grad()
def split_projections(model: nn.Module, whole: Collection[str] = ()) -> None:
    """Make every packed projection of a model linear layers of their own, over the same memory.

    Their parameters are new objects, so this comes before an optimizer, a wrapper or an adapter is made.

    Args:
        model: what holds them.
        whole: names of weights whose packed projection becomes one plain layer.

    Raises:
        ValueError: a packed projection is sharded, wrapped or hooked into.
    """
    kept = {id(model.get_parameter(name)) for name in whole}
    for owner, name, packed in list(_children(model, PackedLinear)):
        _check_plain([packed], PackedLinear, "split", "split before sharding and before adding adapters")
        if id(packed.weight) in kept:
            weight = cast(nn.Parameter, packed.weight)
            _replace(owner, name, {name: _filled(Linear, weight, packed.bias)})
            continue
        weights = _cut(packed.weight, packed.parts)
        biases = [None] * len(weights) if packed.bias is None else _cut(packed.bias, packed.parts)
        linears = [_filled(Linear, *pair) for pair in zip(weights, biases, strict=True)]
        made = dict(zip(packed.parts, linears, strict=True))
        _replace(owner, name, {**made, name: SplitProjections(owner, packed.parts)})


@torch.no_grad()
def fuse_projections(model: nn.Module) -> None:
    """Turn `split_projections` back: in place, or with a copy where parts no longer lie below one another.

    Raises:
        ValueError: a part is no longer a plain linear layer, or the parts differ in what they are.
    """
    for owner, name, split in list(_children(model, SplitProjections)):
        linears = [getattr(owner, part) for part in split.parts]
        _check_plain(linears, Linear, "fused", "merge or unload adapters first")
        weight = _join([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        packed = _filled(PackedLinear, weight, _join(biases) if biases else None)
        packed._name_parts(split.parts)
        for part in split.parts:
            del owner._modules[part]
        _replace(owner, name, {name: packed})


def packed_weights(model: nn.Module, weight_map: WeightMap) -> tuple[list[str], list[str]]:
    """The names of packed projections' weights: those that a checkpoint holds in parts, and those that it
    holds whole.
    """
    names = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, PackedLinear)]
    whole = [name for name in names if isinstance(weight_map[name], Ref)]
    return [name for name in names if name not in whole], whole


def weight_map_of_parts(model: nn.Module, weight_map: WeightMap) -> dict[str, Expr]:
    """The weight map of a model, some of whose packed projections are split, from that of the fused one."""
    split = {  # also within what PEFT keeps beside the copy that it trains
        plain_path(path).replace(".original_module.", "."): module.parts
        for path, module in model.named_modules()
        if isinstance(module, SplitProjections)
    }
    expressions: dict[str, Expr] = {}
    for name, packed in weight_map.items():
        path, _, kind = name.rpartition(".")
        if path not in split:
            expressions[name] = packed
            continue
        start = 0
        for part, rows in split[path].items():
            expressions[f"{_beside(path, part)}.{kind}"] = rows_of(packed, start, start + rows)
            start += rows
    return expressions


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


def _cut(packed: Tensor, rows: Mapping[str, int]) -> list[nn.Parameter]:
    """Parameters over the rows of a packed one, and over those of its gradient."""
    sizes = list(rows.values())
    parts = [nn.Parameter(part, packed.requires_grad) for part in packed.detach().split(sizes)]
    if packed.grad is not None:
        for part, grad in zip(parts, packed.grad.split(sizes), strict=True):
            part.grad = grad
    return parts


def _join(parts: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter over these, which lie below one another, or a copy of them."""
    if len({(part.dtype, part.device, part.requires_grad) for part in parts}) > 1:
        raise ValueError(
            "projections that differ in dtype, device or requires_grad cannot be fused; make them equal first"
        )
    packed = nn.Parameter(_below([part.detach() for part in parts]), parts[0].requires_grad)
    if any(part.grad is not None for part in parts):
        packed.grad = _below([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])
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
    old = dict(owner._modules)
    mode = owner.training
    owner._modules.clear()
    for key, module in old.items():
        owner._modules.update(by if key == name else {key: module})
    for module in by.values():
        module.train(mode)


def _beside(path: str, name: str) -> str:
    parent = path.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name
