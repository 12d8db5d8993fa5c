"""An MLP over one tile of the sequence after the other.

    forward:   h = act(x[tile] U^T + a);  y[tile] = h D^T + b
    backward:  the same again, then  dh = dy[tile] D,  du = act'(dh),  dx[tile] = du U,
               dD += dy[tile]^T h,  dU += du^T x[tile]

What is as wide as the MLP exists for a tile alone. Sums over tiles are in float32 and rounded once, as those
within one matrix product over all tokens are: a weight's gradient is as near to the truth as without tiles.
Norms need no tiles, since nothing of theirs is wider than the hidden states, and the loss has its own
(kernels/losses/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels._dispatch import ceil_div, once_differentiable
from liger_models.kernels.losses._linear_chunks import add_product
from liger_models.layers.projections.linear import project
from liger_models.layers.projections.packed_linear import SplitProjections
from liger_models.layers.recompute.activation_memory import output_is_ours, recompute

# Tokens in a tile, at the most. Each reads and writes the float32 sums once, in 1% of its products' time.
TILE = 16384


def mlp_in_tiles(
    mlp: nn.Module,
    x: Tensor,
    up: nn.Module,
    activation: Callable[[Tensor], Tensor],
    down: nn.Module,
    whole: Callable[[Tensor], Tensor],
) -> Tensor:
    """down(activation(up(x))) for x [..., H], which is what `whole` computes at once.

    `up` and `down` are parts of `mlp`, and may be other than plain linear layers: adapters, quantised layers,
    what somebody has hooked into. Those run tile by tile where this costs no precision: where what is trained
    in the MLP is float32, as adapters are. Else all tokens run at once.
    """
    if x.shape[:-1].numel() <= TILE:
        return whole(x)
    rows = x.reshape(-1, x.shape[-1])
    ups, downs = _plain_linears(up), _plain_linears(down)
    if ups and downs and x.dtype == downs[0].weight.dtype and not torch.is_autocast_enabled(x.device.type):
        parameters = [parameter for linear in (*ups, *downs) for parameter in (linear.weight, linear.bias)]
        numbers = list(activation.parameters()) if isinstance(activation, nn.Module) else []
        plan = _Plan(activation, len(ups))
        y = _Make.apply(_Keep.apply(rows, plan, *parameters, *numbers), plan, *parameters)
    elif any(p.requires_grad and p.dtype.itemsize < 4 for p in mlp.parameters()):
        return recompute(whole, x)
    else:
        y = torch.cat([recompute(whole, tile) for tile in rows.split(TILE)])
    return y.unflatten(0, x.shape[:-1])


def project_pieces(pieces: Sequence[Tensor], linear: nn.Module) -> Tensor:
    """linear(cat(pieces)) for pieces [T, a], [T, b] and so on that lie side by side: put together tile by
    tile, they do not exist a second time.
    """
    if len(pieces) == 1:
        return linear(pieces[0])
    plain = _plain_linears(linear)
    if not plain or pieces[0].dtype != plain[0].weight.dtype or len(pieces[0]) <= TILE:
        return linear(torch.cat(list(pieces), dim=-1))
    return _ProjectPieces.apply(plain[0].weight, plain[0].bias, *pieces)


def _plain_linears(module: nn.Module) -> list[nn.Linear]:
    """The layers whose outputs side by side are the module's, if all of them are plain; else none."""
    layers = module.linears() if isinstance(module, SplitProjections) else [module]
    plain = [layer for layer in layers if isinstance(layer, nn.Linear) and output_is_ours(layer)]
    return plain if len(plain) == len(layers) else []


def _tiles(tokens: int) -> Iterator[slice]:
    """Tiles of nearly equal length."""
    size = ceil_div(tokens, ceil_div(tokens, TILE))
    return (slice(start, start + size) for start in range(0, tokens, size))


class _Plan:
    """The products of an MLP from its parameters, a row of weights and biases in turn: those of the `num_ups`
    layers side by side in front of the activation, those of the layer behind it, and then the activation's.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], num_ups: int):
        self.activation, self.num_ups = activation, num_ups

    def up(self, x: Tensor, parameters: Sequence[Any]) -> Tensor:
        """x [n, H] -> [n, what the activation takes]."""
        products = [project(x, *parameters[2 * i : 2 * i + 2]) for i in range(self.num_ups)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def down(self, h: Tensor, parameters: Sequence[Any]) -> Tensor:
        """h [n, I] -> [n, H]."""
        return project(h, *parameters[2 * self.num_ups : 2 * self.num_ups + 2])


class _Keep(torch.autograd.Function):
    """Keeps an MLP's input for its backward pass, which is done here, and hands it to `_Make`.

    It is an operation of its own so that a layer that runs again may stop here, where all is kept that there
    is to keep, and need not make the MLP's output if nobody keeps that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: Tensor | None) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, *parameters)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [T, H] is the gradient of what `_Make` made."""
        plan: _Plan = ctx.plan
        x, *parameters = ctx.saved_tensors
        want_x, _, *wanted = ctx.needs_input_grad
        down = 2 * plan.num_ups
        sums = [_Sum(parameter, want) for parameter, want in zip(parameters, wanted, strict=True)]
        numbers = [i for i in range(down + 2, len(parameters)) if wanted[i]]
        dx = torch.empty_like(x) if want_x else None
        for tile in _tiles(len(x)):
            x_tile, dy_tile = x[tile], dy[tile]
            z = plan.up(x_tile, parameters).requires_grad_()
            with torch.enable_grad():
                h = plan.activation(z)
            _add_gradients(sums[down : down + 2], dy_tile, h.detach())
            dh = dy_tile @ parameters[down]
            dz, *dnumbers = torch.autograd.grad(h, [z, *(parameters[i] for i in numbers)], dh)
            del h, dh, z  # before the sums of the next tile's products
            for i, dnumber in zip(numbers, dnumbers, strict=True):
                sums[i].add(dnumber)
            for i, part in enumerate(dz.split([len(parameters[2 * i]) for i in range(plan.num_ups)], dim=-1)):
                _add_gradients(sums[2 * i : 2 * i + 2], part, x_tile)
                if dx is not None:
                    add_product(dx[tile], part, parameters[2 * i], first=i == 0)
            del dz, part  # before what the next tile makes
        return dx, None, *(total.rounded() for total in sums)


class _Make(torch.autograd.Function):
    """The MLP of what `_Keep` kept. Its backward pass hands the gradient of the output on to that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        for tile in _tiles(len(x)):
            y[tile] = plan.down(plan.activation(plan.up(x[tile], parameters)), parameters)
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
    """The gradient of a parameter over tiles, in float32 (float64 for such parameters); of none, or of one
    that wants none, nothing.
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
        """Add a @ b, of matrices."""
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
    """Those of weight and bias, of a tile of y = x @ weight.T + bias."""
    weight, bias = sums
    if weight.parameter is not None:
        weight.add_product(dy.t(), x)
    if bias.parameter is not None:
        bias.add(dy.sum(0, dtype=bias._dtype))


def working_bytes(tokens: int, wide: int, parameters: int, itemsize: int) -> int:
    """What the backward pass takes beside its input, its gradient and theirs: of a tile what is as wide as
    the MLP, `wide` elements a token, and the float32 sums of `parameters` elements.
    """
    size = ceil_div(tokens, ceil_div(tokens, TILE))
    return size * wide * itemsize + parameters * max(4, itemsize)
