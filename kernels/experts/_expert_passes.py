"""Forward and backward passes of `moe_experts`, over rows sorted by expert; its file has the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_models.kernels._dispatch import as_rows
from liger_models.kernels.activations.gated import Activation, has_gate
from liger_models.kernels.experts._expert_float8 import float8_rows_product
from liger_models.kernels.experts._expert_operands import Make
from liger_models.kernels.experts._expert_order import ExpertOrder, split_tiles
from liger_models.kernels.experts._expert_paths import ExpertPath, pack_paths, path_gradients
from liger_models.kernels.experts._expert_rows import (
    activated,
    activation_backward,
    spread_rows,
    sum_by_expert,
    sum_slots,
    weighted_activation,
)
from liger_models.kernels.experts._grouped_products import rows_product, weight_product


class Exchange(Protocol):
    """Rows of tokens that ranks exchange while the experts' products run.

    Attributes:
        own: number of tokens of this rank. They are the first ones.
        ranks: that share the experts.
        overlaps: set if the products take part: other tokens' rows of x, and all rows of the gradient of the
            result, may then still be missing when they are given to the products.
        divisor: of the matrices' gradients: a power of two, by which operands are divided exactly.
    """

    own: int
    ranks: int
    overlaps: bool
    divisor: int

    def num_rows(self) -> int:
        """Number of slots with an expert. Waits until it is known to the host."""

    def own_rows(self) -> Tensor:
        """This rank's rows [t, H], which need not arrive. Those of all tokens will then lack them."""

    def fill(self) -> None:
        """Copy this rank's rows to their place among those of all tokens, unless they are there."""

    def arrive(self) -> None:
        """Wait until the rows of all tokens are there, this rank's included unless `own_rows` took them."""

    def leave(self, rows: Tensor) -> None:
        """Start to return the other tokens' rows of a result [T, H]; its own rows are not there yet."""

    def parts(self) -> Tensor:
        """The other ranks' results [n - 1, t, H] for this rank's tokens, to be added to its own. Waits."""

    def leave_weights(self, dweights: Tensor) -> None:
        """Start to return the other tokens' rows of the weights' gradient [T, k]."""


class Overlap(NamedTuple):
    """An exchange, from which come `arrive`, `leave` and `parts`, the number of this rank's tokens, and the
    tiles of only these and all others (`split_tiles`).
    """

    arrive: Callable[[], None]
    leave: Callable[[Tensor], None]
    parts: Callable[[], Tensor]
    tokens: int
    own: ExpertOrder
    rest: ExpertOrder

    @classmethod
    def of(cls, exchange: Exchange, order: ExpertOrder) -> Overlap:
        tiles = split_tiles(order, exchange.own)
        return cls(exchange.arrive, exchange.leave, exchange.parts, exchange.own, *tiles)

    def with_rows(self, num_rows: int) -> Overlap:
        return self._replace(own=self.own.with_rows(num_rows), rest=self.rest.with_rows(num_rows))


class Wanted(NamedTuple):
    """Which inputs require gradients."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool

    @classmethod
    def of(cls, needed: Sequence[bool]) -> Wanted:
        """Read `needs_input_grad` of a function of x, weights, experts, both matrices and both biases."""
        x, weights, _, *of_experts = needed[:7]
        return cls(x, weights, *of_experts)


class LowRank(NamedTuple):
    """The low-rank paths of one stack in the backward pass: their t [R, P], and which a's and b's require
    gradients.
    """

    paths: Sequence[ExpertPath] = ()
    t: Tensor | None = None
    wanted: Sequence[tuple[bool, bool]] = ()

    @property
    def wants_a(self) -> bool:
        return any(a for a, _ in self.wanted)


NO_PATHS = LowRank()


def activated_product(
    x: Tensor,
    weights: Tensor,
    gate_up: Make,
    gate_up_bias: Tensor | None,
    order: ExpertOrder,
    activation: Activation,
    inputs: bool,
    first: Sequence[ExpertPath] = (),
    last: Sequence[ExpertPath] = (),
    overlap: Overlap | None = None,
    float8: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the activation's output [R, I], its t of the last paths, h [R, 2 I], or [R, I], and t of the
    first paths.
    """
    bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    if overlap is not None and first:
        overlap.arrive()
    path, first_t = _low_rank(as_rows(x), first, order, gather=True)
    options: Any = {"transposed": True, "gather": True, "bias": bias, "path": path}
    h = _product_of_arriving(as_rows(x), gate_up(), order, overlap, float8, **options)
    product = (
        weighted_activation(h, weights, order, activation) if inputs else activated(h, activation, order)
    )
    return product, _low_rank(product, last, order)[1], h, first_t


def summed(
    product: Tensor,
    t: Tensor | None,
    weights: Tensor,
    down: Make,
    down_bias: Tensor | None,
    order: ExpertOrder,
    inputs: bool,
    paths: Sequence[ExpertPath] = (),
    overlap: Overlap | None = None,
    float8: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the result [T, H]; in `out`, which has that of later windows, if given."""
    bias = None if down_bias is None else down_bias.contiguous()
    path = None if t is None else (t, pack_paths(paths, order.offsets.numel() - 1, t.dtype).b)
    options: Any = {"transposed": True, "bias": bias, "path": path}
    of_sum = None if inputs else weights
    return _summed_product(product, down, order, of_sum, overlap, float8, out, **options)


def _product_of_arriving(
    x: Tensor, matrices: Tensor, order: ExpertOrder, overlap: Overlap | None, float8: bool, **options: Any
) -> Tensor:
    """Return `rows_product`, at first of this rank's tokens, while the others arrive; in float8 of all, as
    they are quantised first.
    """
    if float8:
        if overlap is not None:
            overlap.arrive()
        return float8_rows_product(x, matrices, order, **options)
    if overlap is None:
        return rows_product(x, matrices, order, **options)
    rows = rows_product(x, matrices, overlap.own, shared_device=True, **options)
    overlap.arrive()
    return rows_product(x, matrices, overlap.rest, out=rows, **options)


def _summed_product(
    a: Tensor,
    make: Make,
    order: ExpertOrder,
    weights: Tensor | None,
    overlap: Overlap | None,
    float8: bool,
    out: Tensor | None,
    **options: Any,
) -> Tensor:
    """Return `rows_product`, summed by token [T, H], in `out` if given. Tokens of other ranks come first, and
    leave while this rank's own are computed, whose sums include the other ranks' results. In float8 all are
    computed at once. The matrices are freed before the last sum.
    """
    if float8:
        return sum_slots(float8_rows_product(a, make(), order, **options), weights, order)
    if overlap is None:
        return sum_slots(rows_product(a, make(), order, **options), weights, order, out=out)
    matrices = make()
    rows = rows_product(a, matrices, overlap.rest, **options)
    y = rows.new_empty(order.position.numel() // order.top_k, rows.shape[1]) if out is None else out
    sum_slots(rows, weights, order, slice(overlap.tokens, None), y)
    overlap.leave(y)
    rows_product(a, matrices, overlap.own, out=rows, shared_device=True, **options)
    del matrices
    return sum_slots(rows, weights, order, slice(overlap.tokens), y, overlap.parts())


def _summed_in_slices(
    a: Tensor, make: Make, order: ExpertOrder, out: Tensor | None, inner: int, **options: Any
) -> Tensor:
    """Return `rows_product`, summed by token [T, H], in `out` if given; in slices of columns, so that rows of
    all columns [R, H], a layer's largest tensor, never exist.
    """
    matrices, path = make(), options.pop("path")
    width = matrices.shape[2]
    step = slice_columns(inner)
    y = a.new_empty(order.position.numel() // order.top_k, width) if out is None else out
    for first in range(0, width, step):
        columns = slice(first, first + step)
        low = None if path is None else (path[0], path[1][..., columns])
        rows = rows_product(a, matrices[..., columns], order, path=low, **options)
        sum_slots(rows, None, order, out=y[:, columns])
        del rows
    return y


def slice_columns(inner: int) -> int:
    """Columns of such a slice: about as many as those of the experts' activations, whole tiles."""
    return max(256, inner // 256 * 256)


def _low_rank(
    x: Tensor, paths: Sequence[ExpertPath], order: ExpertOrder, gather: bool = False
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return t = x A^T [R, P] with B, for `rows_product`, and t."""
    if not paths:
        return None, None
    packed = pack_paths(paths, order.offsets.numel() - 1, x.dtype)
    t = rows_product(x, packed.a, order, transposed=True, gather=gather)
    return (t, packed.b), t


def experts_backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor | None,
    gate_up: Make,
    down: Make,
    down_bias: Tensor | None,
    h: Tensor,
    order: ExpertOrder,
    activation: Activation,
    inputs: bool,
    want: Wanted,
    first: LowRank = NO_PATHS,
    last: LowRank = NO_PATHS,
    exchange: Exchange | None = None,
    float8: bool = False,
    later: Sequence[ExpertOrder] = (),
    again: Callable[[ExpertOrder], tuple[Tensor, Tensor | None, Tensor | None]] | None = None,
    into: tuple[Any, ...] = (None,) * 4,
    overwrite: bool = False,
    divisor: int = 1,
    own_dy: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the required gradients, in the order of `Wanted`, and the list of the paths' gradients. Buffers
    are freed as soon as possible.

    Args:
        overwrite: h is not needed again, and its memory may be used.
        later: the windows after `order`. Their h, and t of the first and last paths, are computed `again`.
        into: the gradients of x, weights, gate_up and down to which those of this window are added.
        divisor: see `Exchange`. Without low-rank paths.
        own_dy: the first rows of dy, if it lacks them.
    """
    original, operands = dy, (x, weights, experts, gate_up, down, down_bias)
    scale = None if divisor == 1 else 1 / divisor
    product_width = h.shape[1] // (2 if has_gate(activation) else 1)
    want_h = want.x or want.gate_up or want.gate_up_bias or bool(first.paths)
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = dproduct = path = None
    biased, x, of_first, of_last = {}, as_rows(x), [], []
    overlap = arriving = None if exchange is None else Overlap.of(exchange, order)
    waits = float8 or last.t is not None or down_bias is not None or not (want_h or want.weights)
    if exchange is not None and waits:
        exchange.arrive()
        arriving = None
    if down_bias is not None and experts is not None and want.weights:
        # For all experts at once: reads dy once instead of once per slot.
        biased = {"of_bias": _wide_product(dy, down_bias.T), "experts": experts.contiguous()}
    gather = not (want.down or want.down_bias)
    by_token = as_rows(dy)  # [T, H]; float8 numbers are gathered in the product, and quantised once a token
    if exchange is not None and arriving is not None:
        if gather:
            exchange.fill()
        else:
            own_dy = exchange.own_rows()
    if own_dy is not None:
        dy, arriving = _spread_in_parts(own_dy, dy, order, arriving)
    else:
        dy = by_token if gather else spread_rows(dy, order)  # [T, H] or [R, H]
    if last.t is not None:
        packed = pack_paths(last.paths, order.offsets.numel() - 1, dy.dtype)
        u = rows_product(dy, packed.b, order, transposed=True, gather=gather)
        path = u, packed.a
    if want_h or want.weights:  # [R, I]
        read, of_tokens = (by_token, True) if float8 else (dy, gather)
        options: Any = {"transposed": False, "gather": of_tokens, "path": path}
        dproduct = _product_of_arriving(read, down(), order, arriving, float8, **options)
        del read
    del by_token
    dh: Any
    product: Any
    dh, dweights, product = activation_backward(  # None where not required
        dproduct,
        h,
        weights,
        order,
        activation,
        want_h,
        want.weights,
        want.down or last.wants_a,
        inputs,
        **biased,
        float8=float8 and want.x,
        dweights=into[1],
        overwrite=overwrite,
        product_scale=scale,
    )
    del dproduct
    if last.t is not None:
        by = None if inputs else weights
        of_last = path_gradients(
            last.paths, last.wanted, order, (product, False), (dy, gather), last.t, u, by
        )
    if want.down:
        ddown = weight_product(dy, product, order, into[3])
    if want.down_bias:
        ddown_bias = sum_by_expert(dy, weights, order)
    del dy, product, biased
    if want.gate_up:
        dgate_up = weight_product(dh, spread_rows(x, order, scale=scale), order, into[2])
    if want.gate_up_bias:
        dgate_up_bias = sum_by_expert(dh, None, order)
    path = None
    if first.t is not None:
        packed = pack_paths(first.paths, order.offsets.numel() - 1, dh.dtype)
        u = rows_product(dh, packed.b, order, transposed=True)
        path = u, packed.a
        of_first = path_gradients(first.paths, first.wanted, order, (x, True), (dh, False), first.t, u)
    dx, of_paths = into[0], [*of_first, *of_last]
    for window in reversed(later):
        assert again is not None
        h, *ts = again(window)
        low = first._replace(t=ts[0]), last._replace(t=ts[1])
        dx, *_, of_gate_up_bias, of_down_bias, more = experts_backward(
            *(original, *operands, h, window, activation, inputs, want, *low),
            into=(dx, dweights, dgate_up, ddown),
            overwrite=True,
            divisor=divisor,
            own_dy=own_dy,
        )
        del h, ts, low
        if dgate_up_bias is not None:
            dgate_up_bias += of_gate_up_bias
        if ddown_bias is not None:
            ddown_bias += of_down_bias
        of_paths = [None if a is None else a + b for a, b in zip(of_paths, more, strict=True)]
    if exchange is not None and dweights is not None:
        exchange.leave_weights(dweights)  # before those of x, for which the next layer waits in any case
    if want.x:
        options = {"transposed": False, "path": path}
        if overlap is None and not (want.gate_up or float8):
            dx = _summed_in_slices(dh, gate_up, order, dx, product_width, **options)
        else:
            dx = _summed_product(dh, gate_up, order, None, overlap, float8, dx, **options)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, of_paths


def _spread_in_parts(
    own: Tensor, dy: Tensor, order: ExpertOrder, overlap: Overlap | None
) -> tuple[Tensor, Overlap | None]:
    """Return rows [R, H] of a gradient dy [T, H] whose first rows are `own`, and whose others may still be
    arriving: then they are spread on arrival.
    """
    rows = dy.new_empty(order.num_rows, dy.shape[1])
    spread_rows(own, order, slice(len(own)), rows)

    def arrive() -> None:
        if overlap is not None:
            overlap.arrive()
        spread_rows(dy, order, slice(len(own), None), rows)

    if overlap is None:
        arrive()
        return rows, None
    return rows, overlap._replace(arrive=arrive)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in float32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
