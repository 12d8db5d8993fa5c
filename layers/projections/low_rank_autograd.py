"""The forward and backward passes of `low_rank_linear`: low_rank.py has the formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels import Float8
from liger_models.kernels._dispatch import autocasts, without_autocast
from liger_models.layers.projections.float8 import (
    Float8Settings,
    forward_product,
    input_gradient,
    weight_gradient,
)
from liger_models.layers.projections.linear import one_below_another
from liger_models.layers.projections.low_rank_plan import Adapter, Path, Plan, Projection


def run_low_rank(
    x: Tensor, y: Tensor | None, projections: Sequence[Projection], dtype: torch.dtype, in_place: bool
) -> Tensor:
    outs: list[slice] = []
    found: list[tuple[int, Adapter]] = []
    for i, projection in enumerate(projections):
        start = outs[-1].stop if outs else 0
        rows = projection.adapters[0].b.shape[0] if projection.adapters else projection.weight.shape[0]
        outs.append(slice(start, start + rows))
        found += [(i, adapter) for adapter in projection.adapters]
    found.sort(key=lambda path: path[1].dropout > 0)
    paths: list[Path] = []
    for layer, adapter in found:
        first = paths[-1].rank.stop if paths else 0
        rank = slice(first, first + adapter.a.shape[0])
        paths.append(Path(layer, outs[layer], rank, float(adapter.scale), adapter.dropout))
    plan = Plan(
        dtype,
        tuple(outs),
        tuple(projection.dense for projection in projections),
        tuple(projection.float8 for projection in projections),
        tuple(projection.rows for projection in projections),
        autocasts(x),
        tuple(paths),
        sum(adapter.a.shape[0] for _, adapter in found if adapter.dropout == 0),
        in_place,
    )
    tensors: list[Any] = [
        *(projection.weight for projection in projections),
        *(projection.bias for projection in projections),
        *(adapter.a for _, adapter in found),
        *(adapter.b for _, adapter in found),
    ]
    small = _cast(plan, tensors)
    t = _Keep.apply(plan, small, x, *tensors)
    return _Sum.apply(plan, small, t.grad_fn, x, t, y, *tensors)


class _Keep(torch.autograd.Function):
    """Compute t and save the tensors for backward.

    `_Sum` does the rest and saves nothing: a layer recomputed in the backward pass stops at the last saved
    tensor, and so before the product with W.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, small: _Small, x: Tensor, *tensors: Tensor) -> Tensor:
        with without_autocast(x):
            rows = _rows(x, plan.dtype)
            t = rows.new_empty(len(rows), plan.rank)
            if plan.shared:
                scales = {path.scale for path in plan.paths if path.dropout == 0}
                together = t[:, : plan.shared]
                alpha = scales.pop() if len(scales) == 1 else 1.0
                torch.addmm(together, rows, small.shared.T, beta=0, alpha=alpha, out=together)
                for path in plan.paths if scales else ():
                    if path.dropout == 0:
                        t[:, path.rank].mul_(path.scale)
            ctx.states = {}
            for i, path in enumerate(plan.paths):
                if path.dropout > 0:
                    ctx.states[i] = _random_state(x.device)
                    seen = _dropped(rows, _kept_elements(rows, path.dropout, None), path.dropout)
                    own = t[:, path.rank]
                    torch.addmm(own, seen, small.down[i].T, beta=0, alpha=path.scale, out=own)
        ctx.save_for_backward(x, t, *tensors)
        ctx.set_materialize_grads(False)
        return t

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        small: _Small,
        kept: Any,
        x: Tensor,
        t: Tensor,
        y: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        weights, biases, _, _ = plan.parts(tensors)
        ctx.plan, ctx.kept = plan, kept
        with without_autocast(x):
            if y is None:
                out = _outputs(plan, _rows(x, plan.dtype), t, weights, biases, small.up)
                return out.view(*x.shape[:-1], plan.width)
            if plan.in_place:
                ctx.mark_dirty(y)
            out = y if plan.in_place else y.clone(memory_format=torch.contiguous_format)
            for path, b in zip(plan.paths, small.up, strict=True):
                out.view(-1, plan.width).addmm_(t[:, path.rank], b.T)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        x, t, *tensors = ctx.kept.saved_tensors
        _, _, _, dx_needed, _, dy_needed, *needed = ctx.needs_input_grad
        with without_autocast(dy):
            flat, small = _rows(dy, dy.dtype), _cast(plan, tensors)
            grads, u = _parameter_grads(ctx, small, x, t, flat, tensors, needed)
            shape, dtype = x.shape, x.dtype
            del x  # recomputed from a recipe, it need not coexist with dx
            dx = _input_grad(ctx, small, flat, u, tensors).view(shape).to(dtype) if dx_needed else None
        return None, None, None, dx, None, dy if dy_needed else None, *grads


def _outputs(
    plan: Plan, x: Tensor, t: Tensor, weights: list[Tensor], biases: list[Any], up: list[Tensor]
) -> Tensor:
    """[tokens, sum of out]. Biases and paths come first, and the product with W is added to them: it reads
    them while it computes; the other order would read and write y once more.
    """
    if any(plan.float8):
        return _float8_outputs(plan, x, t, weights, biases, up)
    y = x.new_empty(len(x), plan.width)
    begun = [False] * len(plan.outs)
    for path, b in zip(plan.paths, up, strict=True):
        part, columns, bias = y[:, path.out], t[:, path.rank], biases[path.layer]
        if begun[path.layer]:
            part.addmm_(columns, b.T)
        elif bias is not None:
            torch.addmm(bias.to(plan.dtype), columns, b.T, out=part)
        else:
            torch.mm(columns, b.T, out=part)
        begun[path.layer] = True
    matrix = _one_matrix(plan, weights)
    for i, (out, bias) in enumerate(zip(plan.outs, biases, strict=True)):
        if not begun[i] and (bias is not None or matrix is not None):
            y[:, out] = 0 if bias is None else bias
            begun[i] = True
    if matrix is not None:
        return y.addmm_(x, matrix.T)
    for i, out in enumerate(plan.outs):
        matrix = _matrix(plan, i, weights)
        if begun[i]:
            y[:, out].addmm_(x, matrix.T)
        else:
            torch.mm(x, matrix.T, out=y[:, out])
        del matrix  # before the next one is decoded
    return y


def _float8_outputs(
    plan: Plan, x: Tensor, t: Tensor, weights: list[Tensor], biases: list[Any], up: list[Tensor]
) -> Tensor:
    """The same if a product runs in float8, which cannot add to what is there: it comes first."""
    products = []
    for _, matrix, settings, of in _products(plan, weights):
        if settings is not None:
            products.append(forward_product(x, matrix, settings, of))
        elif isinstance(matrix, Tensor):
            products.append(x @ matrix.T)
        del matrix
    y = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    del products
    for out, bias in zip(plan.outs, biases, strict=True):
        if bias is not None:
            y[:, out] += bias.to(plan.dtype)
    for path, b in zip(plan.paths, up, strict=True):
        y[:, path.out].addmm_(t[:, path.rank], b.T)
    return y


def _products(
    plan: Plan, weights: list[Tensor]
) -> Iterator[tuple[slice, Tensor | Float8, Float8Settings | None, Sequence[Tensor]]]:
    """The outputs, the matrix and the precision of each product, and the weights of which the matrix is a
    view, if it is one of several: of all layers at once where possible. Weights that are decoded anyway are
    joined, and so are those stored in e4m3.
    """
    one = plan.float8[0] if len({*plan.float8}) == 1 else None
    if one is not None and all(plan.rows) and not one.one_scale:
        stored = [rows(weight) for rows, weight in zip(plan.rows, weights, strict=True) if rows is not None]
        yield slice(None), stored[0] if len(stored) == 1 else _joined(stored), one, ()
        return
    if one is not None:
        matrix, of = _one_matrix(plan, weights), weights
        if matrix is None and any(plan.dense):
            matrix, of = torch.cat([_matrix(plan, i, weights) for i in range(len(weights))]), []
        if matrix is not None:
            yield slice(None), matrix, one, of
            return
    for i, out in enumerate(plan.outs):
        yield out, _matrix(plan, i, weights), plan.float8[i], ()


def _joined(parts: Sequence[Float8]) -> Float8:
    codes = torch.cat([part.values.view(torch.uint8) for part in parts])
    return Float8(codes.view(parts[0].values.dtype), torch.cat([part.scales for part in parts]))


def _parameter_grads(
    ctx: Any,
    small: _Small,
    x: Tensor,
    t: Tensor,
    dy: Tensor,
    tensors: list[Tensor],
    needed: list[bool],
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradients of all tensors that need one, and u = s dy B."""
    plan: Plan = ctx.plan
    weights, biases, down, up = plan.parts(tensors)
    of_weights, of_biases, of_down, of_up = (list(part) for part in plan.parts(needed))  # type: ignore[arg-type]
    rows = _rows(x, plan.dtype)
    grads: list[Tensor | None] = [None] * len(tensors)
    m, n = len(plan.outs), len(plan.paths)
    for i, out in enumerate(plan.outs):
        if of_weights[i]:
            settings = plan.float8[i]
            gradient = (
                dy[:, out].T @ rows if settings is None else weight_gradient(dy[:, out], rows, settings)
            )
            grads[i] = gradient.to(weights[i].dtype)
        if of_biases[i]:
            grads[m + i] = dy[:, out].sum(0).to(biases[i].dtype)
    u = dy.new_empty(len(dy), plan.rank)
    for i, path in enumerate(plan.paths):
        dy_part, u_part = dy[:, path.out], u[:, path.rank]
        torch.addmm(u_part, dy_part, small.up[i], beta=0, alpha=path.scale, out=u_part)
        if of_up[i]:
            grads[2 * m + n + i] = _outer(dy_part, t[:, path.rank]).to(up[i].dtype)
    if any(of_down[i] for i, path in enumerate(plan.paths) if path.dropout == 0):
        shared = _outer(u[:, : plan.shared], rows)
        for i, path in enumerate(plan.paths):
            if path.dropout == 0:
                grads[2 * m + i] = shared[path.rank].to(down[i].dtype)
    for i, state in ctx.kept.states.items():
        path = plan.paths[i]
        if of_down[i]:
            seen = _dropped(rows, _kept_elements(rows, path.dropout, state), path.dropout)
            grads[2 * m + i] = _outer(u[:, path.rank], seen).to(down[i].dtype)
    return grads, u


def _input_grad(ctx: Any, small: _Small, dy: Tensor, u: Tensor, tensors: list[Tensor]) -> Tensor:
    """dx = u A + dy W, [tokens, in], in this order; in float8 in the other."""
    plan: Plan = ctx.plan
    weights = plan.parts(tensors)[0]
    dx: Tensor | None = None
    in_float8 = any(plan.float8)
    if in_float8:
        for out, factor, settings, of in _products(plan, weights):
            whole = out == slice(None)
            part = dy if whole else dy[:, out]
            if settings is not None:
                product = input_gradient(part, factor, settings, of)
            elif isinstance(factor, Tensor):
                product = part @ factor
            dx = product if dx is None else dx.add_(product)
            del factor, product
    if plan.shared:
        through = u[:, : plan.shared]
        dx = through @ small.shared if dx is None else dx.addmm_(through, small.shared)
    for i, state in ctx.kept.states.items():
        path = plan.paths[i]
        through = u[:, path.rank] @ small.down[i]
        through = _dropped(through, _kept_elements(through, path.dropout, state), path.dropout)
        dx = through if dx is None else dx.add_(through)
    if weights[0] is None or in_float8:
        assert dx is not None
        return dx
    matrix = _one_matrix(plan, weights)
    for i, out in enumerate(plan.outs if matrix is None else [slice(None)]):
        factor = _matrix(plan, i, weights) if matrix is None else matrix
        dx = dy[:, out] @ factor if dx is None else dx.addmm_(dy[:, out], factor)
        del factor  # before the next one is decoded
    assert dx is not None
    return dx


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() == 2 and x.dtype == dtype:
        return x  # itself: it may carry a copy in float8
    return x.reshape(-1, x.shape[-1]).to(dtype)


class _Small(NamedTuple):
    """The paths' matrices in the dtype of the product; the A's of paths without dropout are joined into
    one.
    """

    down: list[Tensor]
    up: list[Tensor]
    shared: Tensor


def _cast(plan: Plan, tensors: Sequence[Tensor]) -> _Small:
    """Cast all tensors in one launch: there are many, and they are small."""
    _, _, trained_down, trained_up = plan.parts(tensors)
    down, up = [a.detach() for a in trained_down], [b.detach() for b in trained_up]
    if any(matrix.dtype != plan.dtype for matrix in (*down, *up)):
        sizes = [matrix.numel() for matrix in (*down, *up)]
        memory = torch.empty(sum(sizes), dtype=plan.dtype, device=down[0].device)
        own = [part.view_as(p) for part, p in zip(memory.split(sizes), (*down, *up), strict=True)]
        torch._foreach_copy_(own, [*down, *up])
        down, up = own[: len(down)], own[len(down) :]
    shared = [a for a, path in zip(down, plan.paths, strict=True) if path.dropout == 0]
    if not shared:
        return _Small(down, up, torch.empty(0))
    together = one_below_another(shared)
    return _Small(down, up, torch.cat(shared) if together is None else together)


def _matrix(plan: Plan, i: int, weights: list[Tensor]) -> Tensor:
    """The weight of one layer, in the dtype of the product under autocast or if stored in another form."""
    dense = plan.dense[i]
    if dense is not None:
        return dense(weights[i]).to(plan.dtype)
    return weights[i].to(plan.dtype) if plan.autocast else weights[i]


def _one_matrix(plan: Plan, weights: list[Tensor]) -> Tensor | None:
    """Return the weights as one matrix if they are contiguous in memory."""
    if plan.autocast or any(plan.dense) or any(plan.rows) or weights[0] is None:
        return None
    return one_below_another([weight.detach() for weight in weights])


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, accumulated and returned in at least float32."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return left.T @ right
    if left.is_cuda:
        return torch.mm(left.T, right, out_dtype=wide)
    return left.T.to(wide) @ right.to(wide)


# Dropout keeps a random state instead of a mask, which would take half as much memory as x.


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _kept_elements(like: Tensor, dropout: float, state: Tensor | None) -> Tensor:
    """Draw the mask of kept elements from the device's random numbers, or again from a saved state."""
    generator = None
    if state is not None:
        generator = torch.Generator(like.device)
        generator.set_state(state)
    # Draw into fresh memory, always of one layout: the random number of an element depends on it.
    mask = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    return mask.bernoulli_(1 - dropout, generator=generator)


def _dropped(x: Tensor, kept: Tensor, dropout: float) -> Tensor:
    return (x * kept).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)
