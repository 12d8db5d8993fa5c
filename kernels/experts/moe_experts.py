"""Experts of a mixture of experts: MLPs that process only the tokens routed to them.

    y[t] = sum over slots j of weights[t, j] * (down[e] @ (act(gate) * up) + down_bias[e]),
           gate, up = gate_up[e] @ x[t] + gate_up_bias[e],
           e = experts[t, j]                                     (Mixtral, arXiv:2401.04088, section 2.1)

Experts with the activation "relu2" have no gates (Nemotron 3, arXiv:2512.20848): gate_up is up [E, I, H], and
max(up, 0)^2 replaces act(gate) * up.

Biases are optional and added inside the products. Weights can multiply the experts' inputs instead (Llama 4);
without biases that equals weighting the output of the first product:

    y[t] = sum over slots j of down[e] @ (act(gate) * up),   gate, up = weights[t, j] * (gate_up[e] @ x[t])

The T k assignments are sorted by expert, so that each matrix product is one launch over all experts
(`_grouped_products.py`) for any distribution, without synchronising with the host. With R = T k rows, h =
[gate | up], a = act(gate) * up and dy the gradient of y:

    da = dy[t] @ down[e]                        (not yet weighted)
    dweights[t, j] = da . a + dy . down_bias[e]      equals dy . (down a + bias), without recomputing it
    dh = weights[t, j] * da * (the activation's derivatives)
    dx[t] = sum over j of dh @ gate_up[e],  dgate_up[e] = sum of dh x^T,  ddown[e] = sum of dy (weights a)^T
    dgate_up_bias[e] = sum of dh,  ddown_bias[e] = sum of weights dy

With weighted inputs h is saved unweighted, and

    dh = weights[t, j] * d,   dweights[t, j] = d . h,   d = da * (the activation's derivatives, at weights h)

Low-rank paths of the matrices (`_expert_paths.py`) run inside these products. With frozen matrices, nothing
of their size is computed, and the products read x and dy by token, without copies by row.

Matrices that are stored in another form (quantised) are made when a product needs them, in forward and again
in backward, and freed after it: gate_up and down never exist at the same time.

For expert parallelism only the device knows how many of the T k slots are of this rank's experts. Their rows
are computed in windows of an eighth more rows than ranks have on average. Usually only the first one has
rows, and the kernels of the others end at once. h is saved for the first, and computed again for the others.
So memory is bounded, no row is dropped, and the host waits for nothing.

Saved for the backward pass: the operands, h [R, 2 I], without gates [R, I], of each low-rank path t [R, P],
and the row order. Sums over slots are in float32 and in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._ahead import compile_ahead
from liger_models.kernels._dispatch import (
    as_once_differentiable,
    at_least_float32,
    ceil_div,
    once_differentiable,
    runs_kernels,
    saves_for_one_pass,
    use_triton,
)
from liger_models.kernels.activations.gated import Activation, activation_constants
from liger_models.kernels.experts._expert_float8 import check_float8, float8_linear_plain
from liger_models.kernels.experts._expert_operands import (
    Make,
    StoredMatrices,
    cast_operands,
    check_operands,
    check_paths,
    divide_gradient,
    made,
)
from liger_models.kernels.experts._expert_operators import experts_operator
from liger_models.kernels.experts._expert_order import ExpertOrder, sort_by_expert, windows
from liger_models.kernels.experts._expert_passes import (
    Exchange,
    LowRank,
    Overlap,
    Wanted,
    activated_product,
    experts_backward,
    summed,
)
from liger_models.kernels.experts._expert_paths import ExpertPath, add_path_plain, folded
from liger_models.kernels.experts._expert_rows import activated
from liger_models.kernels.experts._grouped_products import rows_class
from liger_models.kernels.float8.product import has_float8_products
from liger_models.kernels.invariant.mode import is_batch_invariant

Weighted = Literal["outputs", "inputs"]


def moe_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | StoredMatrices,
    down: Tensor | StoredMatrices,
    activation: Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weighted: Weighted = "outputs",
    num_rows: int | None = None,
    gate_up_paths: Sequence[ExpertPath] = (),
    down_paths: Sequence[ExpertPath] = (),
    exchange: Exchange | None = None,
    float8: bool = False,
) -> Tensor:
    """Weighted sum over a token's experts of down(act(gate(x)) * up(x)), or of down(act(up(x))).

    Args:
        x: [T, H], any floating dtype.
        weights: [T, k], any floating dtype; used in float32.
        experts: [T, k], integers in [0, E). Not checked on a GPU, where other values are undefined behaviour.
        gate_up: [E, 2 I, H], the gate's rows first, or up [E, I, H] without gates, in x's dtype.
        down: [E, H, I], in x's dtype. Both may be frozen `StoredMatrices`, under autocast in its dtype.
        activation: of the gate: "silu", "gelu_tanh" or "gelu"; of both, a `ClampedSwiGLU` or
            `CappedSwiGLU`; or "relu2", of experts without gates.
        gate_up_bias: [E, 2 I], the gate's first, or [E, I], in x's dtype, or None.
        down_bias: [E, H], in x's dtype, or None. It is weighted like the rest of an expert's output.
        weighted: whether the weights multiply the experts' "outputs", or their "inputs" (without biases).
        num_rows: for expert parallelism: allows empty slots (expert -1), which cost no work and no memory,
            and gives the number of the other slots. Not checked on a GPU. With `exchange`, its own number.
        gate_up_paths, down_paths: low-rank paths of the matrices, in any floating dtypes; their gradients are
            summed in float32, as if each matrix were W + scale * B A, which is never computed.
        exchange: for expert parallelism, of rows between ranks while the products run.
        float8: compute the products with the matrices, forward and for the gradients of their inputs, from
            operands quantised to e4m3 by rows (`_expert_float8.py`), on GPUs that can; elsewhere emulate
            it. In bfloat16 without low-rank paths, all widths multiples of 16. Gradients of the matrices
            are not quantised. Not under torch.compile, which computes in bfloat16.

    Under autocast, x, the matrices and their biases may have any dtypes and are cast to autocast's. Under
    torch.compile on a CPU, all experts compute all tokens; on any device, it computes W + scale * B A.

    Returns:
        [T, H] in the products' dtype. Results and gradients are deterministic. Gradients are computed only
        for inputs that require them.

    Raises:
        ValueError: incompatible shapes, an unknown activation, weighted inputs with biases, tensors on
            different devices; empty slots under torch.compile; widths or paths that float8 does not take.
        TypeError: incompatible dtypes.
        IndexError: an expert outside [0, E), on a CPU.
    """
    check_operands(x, weights, experts, gate_up, down, activation, gate_up_bias, down_bias, weighted)
    inputs = weighted == "inputs"
    first: Any
    last: Any
    x, first, last, gate_up_bias, down_bias = cast_operands(x, gate_up, down, gate_up_bias, down_bias)
    check_paths("gate_up_paths", gate_up_paths, first)
    check_paths("down_paths", down_paths, last)
    if float8:
        check_float8(x, first, down, (*gate_up_paths, *down_paths))
    biases = gate_up_bias, down_bias
    if torch.compiler.is_compiling():
        if num_rows is not None or exchange is not None:
            raise ValueError(
                "num_rows was given: empty slots are not supported under torch.compile; run this eagerly"
            )
        first, last = folded(made(first), gate_up_paths), folded(made(last), down_paths)
        if runs_kernels(x) and x.dtype != torch.float64:
            constants = activation_constants(activation).values()
            return experts_operator(x, weights, experts, first, last, *biases, *constants, inputs)[0]
        return _dense(x, weights, experts, first, last, *biases, activation, inputs)
    of_paths = [tensor for path in (*gate_up_paths, *down_paths) for tensor in path[:2]]
    matrices = [m for m in (first, last) if not isinstance(m, StoredMatrices)]
    by_kernels = use_triton(x, weights, experts, *matrices, *biases, *of_paths)
    if by_kernels and (not float8 or has_float8_products(x.device)):
        operands = x, weights, experts, first, last, *biases, activation, inputs, num_rows
        plain = len(matrices) == 2 and exchange is None and not float8
        if plain and torch.is_grad_enabled():
            _compile_first(*operands, gate_up_paths, down_paths)
        return _by_kernels(*operands, gate_up_paths, down_paths, exchange, float8)
    first, last, paths = made(first), made(last), (gate_up_paths, down_paths)
    if exchange is not None:
        num_rows = int((experts >= 0).sum())
        exchange.arrive()
        if exchange.divisor > 1:
            first, last = (divide_gradient(matrices, exchange.divisor) for matrices in (first, last))
    options = activation, *biases, weighted, num_rows, *paths, float8
    return as_once_differentiable(moe_experts_plain(x, weights, experts, first, last, *options))


def _by_kernels(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | StoredMatrices,
    down: Tensor | StoredMatrices,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    inputs: bool,
    num_rows: int | None,
    gate_up_paths: Sequence[ExpertPath],
    down_paths: Sequence[ExpertPath],
    exchange: Exchange | None = None,
    float8: bool = False,
) -> Tensor:
    of_paths = [tensor for path in (*gate_up_paths, *down_paths) for tensor in path[:2]]
    scales = [path.scale for path in gate_up_paths], [path.scale for path in down_paths]
    stored = _Matrices(*(m if isinstance(m, StoredMatrices) else None for m in (gate_up, down)))
    matrices: list[Any] = [None if isinstance(m, StoredMatrices) else m for m in (gate_up, down)]
    tensors: Any = x, weights, experts, *matrices, gate_up_bias, down_bias
    # Quantising or decoding matrices for windows that are usually empty would cost more than waiting.
    waits = float8 or any(m is not None for m in stored)
    order, parts, most, overlap = _ordered(experts, gate_up.shape[0], num_rows, exchange, waits)
    exchange = None if overlap is None else exchange
    shared = activation, inputs, stored, scales, exchange, overlap, float8
    plan = _Plan(order, parts, most, *shared, saves_for_one_pass())
    product, t = _First.apply(plan, *tensors, *of_paths)
    return _Last.apply(plan, product.grad_fn, product, t, *tensors, *of_paths)


def _compile_first(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, *others: Any) -> None:
    """Compile the kernels of both passes side by side, before the first call of its kind."""
    *_, num_rows, gate_up_paths, down_paths = others
    rows = rows_class(experts.numel() if num_rows is None else num_rows, len(gate_up))
    parts = (part for path in (*gate_up_paths, *down_paths) for part in path[:2])
    tensors = [x, weights, experts, gate_up, *others[:3], *parts]
    kinds = (None if t is None else (t.dtype, t.requires_grad, t.shape[1:], t.stride()) for t in tensors)
    key = (*kinds, *others[3:5], len(gate_up), len(gate_up_paths), rows, is_batch_invariant())
    compile_ahead(_by_kernels, key, x, weights, experts, gate_up, *others)


def moe_experts_plain(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weighted: Weighted = "outputs",
    num_rows: int | None = None,
    gate_up_paths: Sequence[ExpertPath] = (),
    down_paths: Sequence[ExpertPath] = (),
    float8: bool = False,
) -> Tensor:
    """Plain twin of `moe_experts`."""
    least = 0 if num_rows is None else -1
    if experts.numel() and not least <= experts.min() <= experts.max() < len(gate_up):
        found = f"from {int(experts.min())} to {int(experts.max())}"
        raise IndexError(f"experts range {found}; expected {least} to {len(gate_up) - 1}")
    if num_rows is not None and (found_rows := int((experts >= 0).sum())) != num_rows:
        raise ValueError(f"num_rows is {num_rows}, but {found_rows} slots have an expert")
    y = torch.zeros_like(at_least_float32(x))
    linear = float8_linear_plain if float8 else F.linear
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        bias = None if gate_up_bias is None else gate_up_bias[e]
        h = linear(x[token], gate_up[e], bias)  # [n, 2 I] or [n, I]
        for path in gate_up_paths:
            h = add_path_plain(h, x[token], path, e, len(gate_up))
        weight = at_least_float32(weights[token, slot]).unsqueeze(-1)
        if weighted == "inputs":
            h, weight = weight * at_least_float32(h), torch.ones_like(weight)
        a = activated(h, activation).to(x.dtype)
        bias = None if down_bias is None else down_bias[e]
        if float8:
            rows = float8_linear_plain(a, down[e], bias, weight)
        else:
            rows = F.linear(a, down[e], bias)  # [n, H]
            for path in down_paths:
                rows = add_path_plain(rows, a, path, e, len(down))
            rows = weight * at_least_float32(rows)
        y = y.index_add(0, token, rows.to(y.dtype))
    return y.to(x.dtype)


def _dense(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    inputs: bool,
) -> Tensor:
    """Plain form in which all experts compute all tokens: the only one without data-dependent shapes."""
    h = torch.einsum("th,eih->tei", x, gate_up)
    h = h if gate_up_bias is None else h + gate_up_bias
    wide = at_least_float32(h)
    weights = at_least_float32(weights).to(wide.dtype)
    share = wide.new_zeros(len(x), len(gate_up)).scatter_add(1, experts.long(), weights)
    if inputs:  # other experts get zero input and return zero
        h, share = share.unsqueeze(-1) * wide, torch.ones_like(share)
    rows = torch.einsum("tei,ehi->teh", activated(h, activation).to(x.dtype), down)
    rows = at_least_float32(rows if down_bias is None else rows + down_bias)
    return torch.einsum("te,teh->th", share, rows).to(x.dtype)


def _ordered(
    experts: Tensor, num_experts: int, num_rows: int | None, exchange: Exchange | None, waits: bool
) -> tuple[ExpertOrder, Sequence[ExpertOrder], int | None, Overlap | None]:
    """The order of the rows, its windows and the number of their rows.

    With an exchange it is made before the host knows the number of rows; without waiting for that, they are
    computed in windows.
    """
    if exchange is None:
        order = sort_by_expert(experts, num_experts, num_rows)
        return order, (order,), None, None
    exchange.overlaps = True
    expected = ceil_div(experts.numel(), exchange.ranks)
    order = sort_by_expert(experts, num_experts, expected=expected)
    if waits:
        overlap, num_rows = Overlap.of(exchange, order), exchange.num_rows()
        order = order.with_rows(num_rows)
        return order, (order,), None, overlap.with_rows(num_rows)
    most = 128 * ceil_div(expected + expected // SPARE, 128)  # slices start at whole 16 bytes
    parts = windows(order, most)
    return order, parts, most, Overlap.of(exchange, parts[0])


SPARE = 8  # a window has an eighth more rows than a rank's experts have on average


class _Matrices(NamedTuple):
    """Stored form of the matrices that are not tensors."""

    gate_up: StoredMatrices | None = None
    down: StoredMatrices | None = None

    def given(self, gate_up: Tensor | None, down: Tensor | None) -> tuple[Make, Make]:
        """Functions that return the matrices for their products."""

        def make(stored: StoredMatrices | None, matrices: Any) -> Make:
            return matrices.contiguous if stored is None else stored.make

        return make(self.gate_up, gate_up), make(self.down, down)


class _Plan(NamedTuple):
    """Arguments that both halves of the layer share."""

    order: ExpertOrder
    windows: Sequence[ExpertOrder]
    most: int | None
    activation: Activation
    inputs: bool
    stored: _Matrices
    scales: tuple[list[float], list[float]]
    exchange: Exchange | None
    overlap: Overlap | None
    float8: bool
    saved_once: bool


class _First(torch.autograd.Function):
    """Compute the activated product and t of the last matrices' paths, and save the tensors for backward.

    `_Last` does the rest and saves nothing: a layer recomputed in the backward pass stops at the last saved
    tensor, and so before the second product.
    """

    @staticmethod
    def forward(ctx, plan, x, weights, experts, gate_up, down, gate_up_bias, down_bias, *ab):
        first, last = _paths(plan.scales, ab)
        make, _ = plan.stored.given(gate_up, down)
        product, last_t, *kept = activated_product(
            *(x, weights, make, gate_up_bias, plan.windows[0], plan.activation, plan.inputs, first, last),
            overlap=plan.overlap,
            float8=plan.float8,
        )
        experts = None if down_bias is None else experts  # needed for the bias only
        bias = gate_up_bias if plan.most else None  # for later windows
        operands = x, weights, experts, gate_up, down, down_bias, bias
        ctx.save_for_backward(*operands, *kept, last_t, *plan.order[:_TENSORS], *ab)
        ctx.set_materialize_grads(False)
        return product, last_t

    @staticmethod
    def backward(ctx, *_):
        return (None,) * len(ctx.needs_input_grad)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, plan, kept, product, last_t, x, weights, experts, gate_up, down, gate_up_bias, down_bias, *ab
    ):
        first, last = _paths(plan.scales, ab)
        make_first, make = plan.stored.given(gate_up, down)
        # Without the order's tensors, which are among the saved ones and are freed with them.
        ctx.plan = plan._replace(order=None, windows=(), overlap=None)
        ctx.sizes, ctx.kept = plan.order[_TENSORS:], kept
        y, inputs = None, plan.inputs
        for window in reversed(plan.windows[1:]):
            of_first = x, weights, make_first, gate_up_bias, window, plan.activation, inputs, first, last
            of_window, t, *_ = activated_product(*of_first)
            y = summed(of_window, t, weights, make, down_bias, window, inputs, last, out=y)
        operands = product, last_t, weights, make, down_bias, plan.windows[0], inputs, last
        return summed(*operands, plan.overlap, plan.float8, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        plan = ctx.plan
        x, weights, experts, gate_up, down, down_bias, bias, h, *rest = ctx.kept.saved_tensors
        ts, ab = rest[:2], rest[2 + _TENSORS :]
        order = ExpertOrder(*rest[2 : 2 + _TENSORS], *ctx.sizes)
        order, *later = windows(order, plan.most) if plan.most else [order]
        first, last = plan.stored.given(gate_up, down)
        low: list[Any] = []
        needed = ctx.needs_input_grad[4:]
        wanted = list(zip(*[iter(needed[7:])] * 2, strict=True))
        for paths, t in zip(_paths(plan.scales, ab), ts, strict=True):
            low.append(LowRank(paths, t, wanted[: len(paths)]))
            del wanted[: len(paths)]

        def again(window: ExpertOrder) -> tuple[Tensor, Tensor | None, Tensor | None]:
            paths = _paths(plan.scales, ab)
            operands = x, weights, first, bias, window, plan.activation, plan.inputs, *paths
            _, last_t, h, first_t = activated_product(*operands)
            return h, first_t, last_t

        of_backward = x, weights, experts, first, last, down_bias, h
        options: Any = plan.activation, plan.inputs, Wanted.of(needed), *low, plan.exchange, plan.float8
        divisor = 1 if plan.exchange is None else plan.exchange.divisor
        options = *options, later, again, (None,) * 4, plan.saved_once, divisor
        dx, dweights, *dexperts, dpaths = experts_backward(dy, *of_backward, order, *options)
        return *[None] * 4, dx, dweights, None, *dexperts, *dpaths


def _paths(
    scales: tuple[list[float], list[float]], ab: Sequence[Tensor]
) -> tuple[list[ExpertPath], list[ExpertPath]]:
    paths = [ExpertPath(*path) for path in zip(ab[::2], ab[1::2], [*scales[0], *scales[1]], strict=True)]
    return paths[: len(scales[0])], paths[len(scales[0]) :]


_TENSORS = 6  # the leading fields of ExpertOrder that are tensors
