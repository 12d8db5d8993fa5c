"""MLPs computed one tile of the sequence at a time.

    forward:   h = act(x[tile] U^T + a);  y[tile] = h D^T + b
    backward:  the same again, then  dh = dy[tile] D,  du = act'(dh),  dx[tile] = du U,
               dD += dy[tile]^T h,  dU += du^T x[tile]

Intermediates as wide as the MLP exist for one tile only. Sums over tiles are in float32 and rounded once,
like sums within a single product over all tokens, so weight gradients are as accurate as without tiles. Norms
need no tiles, since they are no wider than the hidden states, and the loss has its own chunks
(kernels/losses/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.kernels import round_inputs, round_weights
from liger_models.kernels._dispatch import ceil_div, once_differentiable
from liger_models.kernels.losses._linear_chunks import add_product
from liger_models.layers.projections.float8 import runs_in_float8
from liger_models.layers.projections.linear import project, unwrapped
from liger_models.layers.projections.packed_linear import SplitProjections
from liger_models.layers.projections.ternary import is_ternary
from liger_models.layers.recompute.activation_memory import output_is_ours, recompute
from liger_models.layers.specs.ternary import TernarySpec

# Maximum tokens per tile. Each tile reads and writes the float32 sums once, in 1% of the time of its
# products.
TILE = 16384


def mlp_in_tiles(
    mlp: nn.Module,
    x: Tensor,
    up: nn.Module,
    activation: Callable[[Tensor], Tensor],
    down: nn.Module,
    whole: Callable[[Tensor], Tensor],
) -> Tensor:
    """down(activation(up(x))) for x [..., H]; `whole` computes the same at once.

    `up` and `down` are parts of `mlp`, both of which may round their operands. They need not be plain linear
    layers: adapters, quantised layers and hooked modules run tile by tile if that costs no precision, which
    requires all trained parameters in the MLP to be float32, as adapters are. Otherwise all tokens run at
    once.
    """
    if x.shape[:-1].numel() <= TILE:
        return whole(x)
    rows = x.reshape(-1, x.shape[-1])
    ups, downs = _plain_linears(up), _plain_linears(down)
    if ups and downs and x.dtype == downs[0].weight.dtype and not torch.is_autocast_enabled(x.device.type):
        parameters = [parameter for linear in (*ups, *downs) for parameter in (linear.weight, linear.bias)]
        numbers = list(activation.parameters()) if isinstance(activation, nn.Module) else []
        plan = _Plan(activation, [*ups, *downs])
        y = _Make.apply(_Keep.apply(rows, plan, *parameters, *numbers), plan, *parameters)
    elif any(p.requires_grad and p.dtype.itemsize < 4 for p in mlp.parameters()):
        return recompute(whole, x)
    else:
        # Slices would each get a gradient of all rows, with zeros outside of the tile.
        y = torch.cat([recompute(whole, tile) for tile in rows.split(_height(len(rows)))])
    return y.unflatten(0, x.shape[:-1])


def project_pieces(pieces: Sequence[Tensor], linear: nn.Module) -> Tensor:
    """linear(cat(pieces)) for pieces [T, a], [T, b] and so on, concatenated one tile at a time."""
    if len(pieces) == 1:
        return linear(pieces[0])
    plain = [layer for layer in _plain_linears(linear) if not is_ternary(layer)]
    if not plain or pieces[0].dtype != plain[0].weight.dtype or len(pieces[0]) <= TILE:
        return linear(torch.cat(list(pieces), dim=-1))
    return _ProjectPieces.apply(plain[0].weight, plain[0].bias, *pieces)


def _plain_linears(module: nn.Module) -> list[nn.Linear]:
    """Linear layers whose concatenated outputs are the module's, if all of them are plain; else none."""
    layers = module.linears() if isinstance(module, SplitProjections) and module.is_sorted else [module]
    plain = [layer for layer in layers if isinstance(layer, nn.Linear) and output_is_ours(layer)]
    if any(map(runs_in_float8, plain)):
        return []
    return plain if len(plain) == len(layers) else []


def _tiles(tokens: int) -> Iterator[slice]:
    """Tiles of nearly equal length."""
    size = _height(tokens)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _height(tokens: int) -> int:
    return ceil_div(tokens, ceil_div(tokens, TILE))


class _Plan:
    """Products of an MLP from its parameters, alternating weights and biases: first of the `num_ups` parallel
    layers before the activation, then of the layer after it, then the activation's parameters. Where the
    layers round their operands, `of_products` gives these.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], linears: Sequence[nn.Linear]):
        self.activation, self.num_ups = activation, len(linears) - 1
        self.ternary: list[tuple[TernarySpec | None, tuple[int, ...]]] = [
            (getattr(linear, "ternary", None), getattr(linear, "heights", ())) for linear in linears
        ]

    def of_products(self, parameters: Sequence[Any]) -> Sequence[Any]:
        """The parameters, with weights as the products read them."""
        read = list(parameters)
        for i, (spec, heights) in enumerate(self.ternary):
            if spec is not None and spec.rounds_weights:
                read[2 * i] = round_weights(read[2 * i], heights)
        return read

    def read(self, x: Tensor) -> Tensor:
        """The input of a product, as that reads it."""
        return x if self.ternary[0][0] is None else round_inputs(x)

    def up(self, x: Tensor, parameters: Sequence[Any]) -> Tensor:
        """x [n, H] -> [n, the activation's input width]."""
        products = [project(x, *parameters[2 * i : 2 * i + 2]) for i in range(self.num_ups)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def down(self, h: Tensor, parameters: Sequence[Any]) -> Tensor:
        """h [n, I] -> [n, H]."""
        return project(h, *parameters[2 * self.num_ups : 2 * self.num_ups + 2])


class _Keep(torch.autograd.Function):
    """Saves an MLP's input and computes its backward pass; passes the input on to `_Make`.

    A separate operation, so that a recomputed layer can stop here, where everything needed is saved, without
    computing the MLP's output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, *parameters)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [T, H] is the gradient of the output of `_Make`."""
        plan: _Plan = ctx.plan
        x, *parameters = ctx.saved_tensors
        want_x, _, *wanted = ctx.needs_input_grad
        down = 2 * plan.num_ups
        sums = [_Sum(parameter, want) for parameter, want in zip(parameters, wanted, strict=True)]
        numbers = [i for i in range(down + 2, len(parameters)) if wanted[i]]
        parameters = plan.of_products(parameters)
        dx = torch.empty_like(x) if want_x else None
        for tile in _tiles(len(x)):
            x_tile, dy_tile = plan.read(x[tile]), dy[tile]
            z = plan.up(x_tile, parameters).requires_grad_()
            with torch.enable_grad():
                h = plan.activation(z)
            _add_gradients(sums[down : down + 2], dy_tile, plan.read(h.detach()))
            dh = dy_tile @ parameters[down]
            dz, *dnumbers = torch.autograd.grad(h, [z, *(parameters[i] for i in numbers)], dh)
            del h, dh, z  # free before the next tile's products
            for i, dnumber in zip(numbers, dnumbers, strict=True):
                sums[i].add(dnumber)
            for i, part in enumerate(dz.split([len(parameters[2 * i]) for i in range(plan.num_ups)], dim=-1)):
                _add_gradients(sums[2 * i : 2 * i + 2], part, x_tile)
                if dx is not None:
                    add_product(dx[tile], part, parameters[2 * i], first=i == 0)
            del dz, part  # free before the next tile
        return dx, None, *(total.rounded() for total in sums)


class _Make(torch.autograd.Function):
    """Computes the MLP from the input saved by `_Keep`, and passes the gradient of its output to that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: Tensor | None) -> Tensor:
        y, operands = torch.empty_like(x), plan.of_products(parameters)
        for tile in _tiles(len(x)):
            h = plan.activation(plan.up(plan.read(x[tile]), operands))
            h = plan.read(h)
            y[tile] = plan.down(h, operands)
            del h  # before the next tile's
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, *[None] * (len(ctx.needs_input_grad) - 1)


class _ProjectPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, *pieces: Tensor) -> Tensor:
        ctx.save_for_backward(weight, bias, *pieces)
        y = pieces[0].new_empty(len(pieces[0]), len(weight))
        for tile in _tiles(len(y)):
            y[tile] = project(_side_by_side(pieces, tile), weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, *pieces = ctx.saved_tensors
        want_weight, want_bias, *want_pieces = ctx.needs_input_grad
        sums = [_Sum(weight, want_weight), _Sum(bias, want_bias)]
        for tile in _tiles(len(dy)):
            _add_gradients(sums, dy[tile], _side_by_side(pieces, tile))
        gradients = (dy @ weight).split([piece.shape[1] for piece in pieces], dim=1)
        return *(total.rounded() for total in sums), *(
            gradient if want else None for gradient, want in zip(gradients, want_pieces, strict=True)
        )


def _side_by_side(pieces: Sequence[Tensor], tile: slice) -> Tensor:
    return torch.cat([piece[tile] for piece in pieces], dim=1)


class _Sum:
    """Gradient of a parameter summed over tiles, in float32 (float64 for float64 parameters); does nothing if
    there is no parameter or no gradient is wanted.
    """

    def __init__(self, parameter: Tensor | None, wanted: bool):
        self.parameter = parameter if wanted else None
        self.total: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        if self.total is None:
            self.total = gradient.to(self._dtype)
        else:
            self.total += gradient

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add the matrix product a @ b."""
        assert self.parameter is not None
        first = self.total is None
        if self.total is None:
            self.total = torch.empty(self.parameter.shape, dtype=self._dtype, device=a.device)
        add_product(self.total, a, b, first)

    def rounded(self) -> Tensor | None:
        if self.parameter is None or self.total is None:
            return None
        total, self.total = self.total, None
        return total.to(self.parameter.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        assert self.parameter is not None
        return torch.promote_types(self.parameter.dtype, torch.float32)


def _add_gradients(sums: Sequence[_Sum], dy: Tensor, x: Tensor) -> None:
    """Add the gradients of weight and bias, for a tile of y = x @ weight.T + bias."""
    weight, bias = sums
    if weight.parameter is not None:
        weight.add_product(dy.t(), x)
    if bias.parameter is not None:
        bias.add(dy.sum(0, dtype=bias._dtype))


def working_bytes(tokens: int, wide: int, parameters: int, itemsize: int) -> int:
    """Additional memory of the backward pass: a tile of the MLP's width, `wide` elements per token, and the
    float32 sums of `parameters` elements.
    """
    size = ceil_div(tokens, ceil_div(tokens, TILE))
    return size * wide * itemsize + parameters * max(4, itemsize)


class LastProduct(NamedTuple):
    """Bytes during the backward pass of an MLP's last product.

    Attributes:
        normed: of the input of a norm before it, which exists next to the gradients of that input and of the
            norm's output; 0 without a norm.
        rounded: whether it rounds its operands.
    """

    normed: int
    rounded: bool

    @staticmethod
    def of(mlp: Any, product: int) -> LastProduct:
        """Of an MLP, where the input of its last product has `product` bytes."""
        rounded = is_ternary(unwrapped(getattr(mlp, "down_proj", mlp)))
        normed = product if getattr(mlp, "down_norm", None) is not None else 0
        return LastProduct(normed, rounded)

    def of_all(self, decoded: Mapping[str, int]) -> int:
        """Further bytes of the product, where decoded or rounded matrices take `decoded`, by their place."""
        return max(decoded["last"], self.normed)

    def of_tiles(self, decoded: Mapping[str, int], tile_input: int, tile_product: int) -> int:
        """Further bytes of an MLP in tiles, given those of a tile's input and of its product. Rounded
        matrices exist for all tiles, and so does a tile's rounded input; of decoded ones, one does.
        """
        both = decoded["last"], decoded["front"]
        matrices = sum(both) + tile_input if self.rounded else max(both)
        return matrices + (2 * tile_product if self.normed else 0)
