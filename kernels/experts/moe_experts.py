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

Saved for the backward pass: the operands, h [R, 2 I], without gates [R, I], of each low-rank path t [R, P],
and the row order. Sums over slots are in float32 and in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    once_differentiable,
    runs_kernels,
    use_triton,
)
from liger_models.kernels.activations.gated import (
    Activation,
    ClampedSwiGLU,
    activation_constants,
    clamped_swiglu,
    geglu,
    has_gate,
    relu2,
    swiglu,
)
from liger_models.kernels.experts._expert_order import ExpertOrder, sort_by_expert
from liger_models.kernels.experts._expert_paths import (
    ExpertPath,
    add_path_plain,
    folded,
    pack_paths,
    path_gradients,
)
from liger_models.kernels.experts._expert_rows import (
    activation_backward,
    spread_rows,
    sum_by_expert,
    sum_slots,
    weighted_activation,
)
from liger_models.kernels.experts._grouped_products import rows_product, weight_product

Weighted = Literal["outputs", "inputs"]
_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


class StoredMatrices(NamedTuple):
    """Frozen matrices of experts that are stored in another form.

    Attributes:
        shape: [E, outputs, inputs] of the matrices.
        dtype: of the matrices.
        make: returns them, contiguous, the same bits in every call. It must not depend on autograd.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


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
) -> Tensor:
    """Weighted sum over a token's experts of down(act(gate(x)) * up(x)), or of down(act(up(x))).

    Args:
        x: [T, H], any floating dtype.
        weights: [T, k], any floating dtype; used in float32.
        experts: [T, k], integers in [0, E). Not checked on a GPU, where other values are undefined behaviour.
        gate_up: [E, 2 I, H], the gate's rows first, or up [E, I, H] without gates, in x's dtype.
        down: [E, H, I], in x's dtype. Both may be frozen `StoredMatrices`, under autocast in its dtype.
        activation: of the gate: "silu", "gelu_tanh" or "gelu"; of both, a `ClampedSwiGLU`; or "relu2", of
            experts without gates.
        gate_up_bias: [E, 2 I], the gate's first, or [E, I], in x's dtype, or None.
        down_bias: [E, H], in x's dtype, or None. It is weighted like the rest of an expert's output.
        weighted: whether the weights multiply the experts' "outputs", or their "inputs" (without biases).
        num_rows: for expert parallelism: allows empty slots (expert -1), which cost no work and no memory,
            and gives the number of the other slots. Not checked on a GPU.
        gate_up_paths, down_paths: low-rank paths of the matrices, in any floating dtypes; their gradients are
            summed in float32, as if each matrix were W + scale * B A, which is never computed.

    Under autocast, x, the matrices and their biases may have any dtypes and are cast to autocast's. Under
    torch.compile on a CPU, all experts compute all tokens; on any device, it computes W + scale * B A.

    Returns:
        [T, H] in the products' dtype. Results and gradients are deterministic. Gradients are computed only
        for inputs that require them.

    Raises:
        ValueError: incompatible shapes, an unknown activation, weighted inputs with biases, tensors on
            different devices; empty slots under torch.compile.
        TypeError: incompatible dtypes.
        IndexError: an expert outside [0, E), on a CPU.
    """
    _check(x, weights, experts, gate_up, down, activation, gate_up_bias, down_bias, weighted)
    inputs = weighted == "inputs"
    first: Any
    last: Any
    x, first, last, gate_up_bias, down_bias = _cast(x, gate_up, down, gate_up_bias, down_bias)
    _check_paths("gate_up_paths", gate_up_paths, first)
    _check_paths("down_paths", down_paths, last)
    biases = gate_up_bias, down_bias
    if torch.compiler.is_compiling():
        if num_rows is not None:
            raise ValueError(
                "num_rows was given: empty slots are not supported under torch.compile; run this eagerly"
            )
        first, last = folded(_made(first), gate_up_paths), folded(_made(last), down_paths)
        if runs_kernels(x) and x.dtype != torch.float64:
            constants = activation_constants(activation).values()
            return _operator(x, weights, experts, first, last, *biases, *constants, inputs)[0]
        return _dense(x, weights, experts, first, last, *biases, activation, inputs)
    of_paths = [tensor for path in (*gate_up_paths, *down_paths) for tensor in path[:2]]
    matrices: list[Any] = [None if isinstance(m, StoredMatrices) else m for m in (first, last)]
    tensors: Any = x, weights, experts, *matrices, *biases
    if use_triton(*tensors, *of_paths):
        scales = [path.scale for path in gate_up_paths], [path.scale for path in down_paths]
        made = _Matrices(*(m if isinstance(m, StoredMatrices) else None for m in (first, last)))
        plan = _Plan(sort_by_expert(experts, first.shape[0], num_rows), activation, inputs, made, scales)
        product, t = _First.apply(plan, *tensors, *of_paths)
        return _Last.apply(plan, product.grad_fn, product, t, *tensors, *of_paths)
    first, last, paths = _made(first), _made(last), (gate_up_paths, down_paths)
    return as_once_differentiable(
        moe_experts_plain(x, weights, experts, first, last, activation, *biases, weighted, num_rows, *paths)
    )


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
) -> Tensor:
    """Plain twin of `moe_experts`."""
    least = 0 if num_rows is None else -1
    if experts.numel() and not least <= experts.min() <= experts.max() < len(gate_up):
        found = f"from {int(experts.min())} to {int(experts.max())}"
        raise IndexError(f"experts range {found}; expected {least} to {len(gate_up) - 1}")
    if num_rows is not None and (found_rows := int((experts >= 0).sum())) != num_rows:
        raise ValueError(f"num_rows is {num_rows}, but {found_rows} slots have an expert")
    y = torch.zeros_like(at_least_float32(x))
    for e in range(len(gate_up)):
        token, slot = torch.where(experts == e)
        h = F.linear(
            x[token], gate_up[e], None if gate_up_bias is None else gate_up_bias[e]
        )  # [n, 2 I] or [n, I]
        for path in gate_up_paths:
            h = add_path_plain(h, x[token], path, e, len(gate_up))
        weight = at_least_float32(weights[token, slot]).unsqueeze(-1)
        if weighted == "inputs":
            h, weight = weight * at_least_float32(h), torch.ones_like(weight)
        a = _activated(h, activation).to(x.dtype)
        rows = F.linear(a, down[e], None if down_bias is None else down_bias[e])  # [n, H]
        for path in down_paths:
            rows = add_path_plain(rows, a, path, e, len(down))
        y = y.index_add(0, token, (weight * at_least_float32(rows)).to(y.dtype))
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
    rows = torch.einsum("tei,ehi->teh", _activated(h, activation).to(x.dtype), down)
    rows = at_least_float32(rows if down_bias is None else rows + down_bias)
    return torch.einsum("te,teh->th", share, rows).to(x.dtype)


def _activated(h: Tensor, activation: Activation) -> Tensor:
    if isinstance(activation, ClampedSwiGLU):
        return clamped_swiglu(h, None, activation.alpha, activation.limit)
    if activation == "relu2":
        return relu2(h)
    if activation == "silu":
        return swiglu(h)
    return geglu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def _made(matrices: Tensor | StoredMatrices) -> Tensor:
    return matrices.make() if isinstance(matrices, StoredMatrices) else matrices


def _check(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | StoredMatrices,
    down: Tensor | StoredMatrices,
    activation: Activation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    weighted: str,
) -> None:
    if not isinstance(activation, ClampedSwiGLU) and activation not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}; expected one of {names}, or a ClampedSwiGLU")
    if x.dim() != 2 or weights.dim() != 2 or weights.shape != experts.shape or len(weights) != len(x):
        shapes = f"x is {tuple(x.shape)}, weights {tuple(weights.shape)}, experts {tuple(experts.shape)}"
        raise ValueError(f"{shapes}; expected [T, H], [T, k] and [T, k]")
    parts = 2 if has_gate(activation) else 1
    if len(gate_up.shape) != 3 or gate_up.shape[1] % parts or gate_up.shape[2] != x.shape[1]:
        rows = "2 I" if parts == 2 else "I"
        raise ValueError(f"gate_up is {tuple(gate_up.shape)}; expected [E, {rows}, {x.shape[1]}]")
    num_experts, outputs, hidden = gate_up.shape
    if down.shape != (num_experts, hidden, outputs // parts):
        expected = f"{(num_experts, hidden, outputs // parts)}, which is [E, H, I]"
        raise ValueError(f"down is {tuple(down.shape)}; expected {expected}")
    for name, bias, width in (("gate_up_bias", gate_up_bias, outputs), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (num_experts, width):
            raise ValueError(f"{name} is {tuple(bias.shape)}; expected {(num_experts, width)}")
    biased = gate_up_bias is not None or down_bias is not None
    if weighted not in ("outputs", "inputs") or (weighted == "inputs" and biased):
        raise ValueError(f"weighted is {weighted!r}; expected 'outputs', or without biases 'inputs'")
    if experts.is_floating_point() or not weights.is_floating_point():
        raise TypeError(
            f"experts are {experts.dtype}, weights {weights.dtype}; expected integers and floating point"
        )


def _check_paths(name: str, paths: Sequence[ExpertPath], matrices: Tensor | StoredMatrices) -> None:
    num_experts, outputs, inputs = matrices.shape
    for path in paths:
        (all_ranks, columns), (rows, ranks) = path.a.shape, path.b.shape
        if all_ranks != ranks or all_ranks % num_experts or (columns, rows) != (inputs, outputs):
            found = f"{tuple(path.a.shape)} and {tuple(path.b.shape)}"
            raise ValueError(
                f"{name} has a path of {found}; expected [{num_experts} r, {inputs}] and "
                f"[{outputs}, r {num_experts}]"
            )
        if not (path.a.is_floating_point() and path.b.is_floating_point()):
            found = f"{path.a.dtype} and {path.b.dtype}"
            raise TypeError(f"{name} has a path of {found}; expected floating point")


def _cast(x: Tensor, *operands: Tensor | StoredMatrices | None) -> tuple[Any, ...]:
    """Cast all operands of the products to autocast's dtype if it is on; otherwise require one dtype."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        operands = tuple(t.to(dtype) if isinstance(t, Tensor) else t for t in operands)
    dtypes = [t.dtype for t in operands if t is not None]
    if any(dtype != x.dtype for dtype in dtypes):
        found = f"{x.dtype} and {', '.join(str(dtype) for dtype in dtypes)}"
        raise TypeError(
            f"x and the experts' matrices and biases are {found}; expected one floating dtype: cast them, or "
            "use autocast"
        )
    return x, *operands


class _Matrices(NamedTuple):
    """The stored form of the matrices that are no tensors."""

    gate_up: StoredMatrices | None = None
    down: StoredMatrices | None = None

    def given(self, gate_up: Tensor | None, down: Tensor | None) -> tuple[Make, Make]:
        """Functions that return the matrices for their products."""

        def make(stored: StoredMatrices | None, matrices: Any) -> Make:
            return matrices.contiguous if stored is None else stored.make

        return make(self.gate_up, gate_up), make(self.down, down)


Make = Callable[[], Tensor]


class _Wanted(NamedTuple):
    """Which inputs require gradients."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class _Plan(NamedTuple):
    """What both halves of the layer share: the order of the rows, the matrices that are no tensors, and the
    scales of the paths.
    """

    order: ExpertOrder
    activation: Activation
    inputs: bool
    stored: _Matrices
    scales: tuple[list[float], list[float]]


class _First(torch.autograd.Function):
    """Compute the activated product and t of the last matrices' paths, and save the tensors for backward.

    `_Last` does the rest and saves nothing: a layer recomputed in the backward pass stops at the last saved
    tensor, and so before the second product.
    """

    @staticmethod
    def forward(ctx, plan, x, weights, experts, gate_up, down, gate_up_bias, down_bias, *ab):
        first, last = _paths(plan.scales, ab)
        make, _ = plan.stored.given(gate_up, down)
        product, last_t, *kept = _activated_product(
            x, weights, make, gate_up_bias, plan.order, plan.activation, plan.inputs, first, last
        )
        experts = None if down_bias is None else experts  # needed for the bias only
        operands = x, weights, experts, gate_up, down, down_bias
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
        _, last = _paths(plan.scales, ab)
        _, make = plan.stored.given(gate_up, down)
        # Without the order's tensors, which are among the saved ones and are freed with them.
        ctx.plan, ctx.sizes, ctx.kept = plan._replace(order=None), plan.order[_TENSORS:], kept
        return _summed(product, last_t, weights, make, down_bias, plan.order, plan.inputs, last)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        plan = ctx.plan
        x, weights, experts, gate_up, down, down_bias, h, *rest = ctx.kept.saved_tensors
        ts, ab = rest[:2], rest[2 + _TENSORS :]
        order = ExpertOrder(*rest[2 : 2 + _TENSORS], *ctx.sizes)
        first, last = plan.stored.given(gate_up, down)
        low: list[_LowRank] = []
        needed = ctx.needs_input_grad[4:]
        wanted = list(zip(*[iter(needed[7:])] * 2, strict=True))
        for paths, t in zip(_paths(plan.scales, ab), ts, strict=True):
            low.append(_LowRank(paths, t, wanted[: len(paths)]))
            del wanted[: len(paths)]
        operands = x, weights, experts, first, last, down_bias, h
        options = plan.activation, plan.inputs, _wanted(needed)
        dx, dweights, *dexperts, dpaths = _backward(dy, *operands, order, *options, *low)
        return *[None] * 4, dx, dweights, None, *dexperts, *dpaths


class _LowRank(NamedTuple):
    """The low-rank paths of one stack in the backward pass: their t [R, P], and which a's and b's require
    gradients.
    """

    paths: Sequence[ExpertPath] = ()
    t: Tensor | None = None
    wanted: Sequence[tuple[bool, bool]] = ()

    @property
    def wants_a(self) -> bool:
        return any(a for a, _ in self.wanted)


_NO_PATHS = _LowRank()


def _paths(
    scales: tuple[list[float], list[float]], ab: Sequence[Tensor]
) -> tuple[list[ExpertPath], list[ExpertPath]]:
    paths = [ExpertPath(*path) for path in zip(ab[::2], ab[1::2], [*scales[0], *scales[1]], strict=True)]
    return paths[: len(scales[0])], paths[len(scales[0]) :]


_TENSORS = 6  # the leading fields of ExpertOrder that are tensors


def _wanted(needed: Sequence[bool]) -> _Wanted:
    x, weights, _, *of_experts = needed[:7]
    return _Wanted(x, weights, *of_experts)


def _activated_product(
    x: Tensor,
    weights: Tensor,
    gate_up: Make,
    gate_up_bias: Tensor | None,
    order: ExpertOrder,
    activation: Activation,
    inputs: bool,
    first: Sequence[ExpertPath] = (),
    last: Sequence[ExpertPath] = (),
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the activation's output [R, I], its t of the last paths, h [R, 2 I], or [R, I], and t of the
    first paths.
    """
    bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    path, first_t = _low_rank(as_rows(x), first, order, gather=True)
    options: Any = {"transposed": True, "gather": True, "bias": bias, "path": path}
    h = rows_product(as_rows(x), gate_up(), order, **options)
    product = weighted_activation(h, weights, order, activation) if inputs else _activated(h, activation)
    return product, _low_rank(product, last, order)[1], h, first_t


def _summed(
    product: Tensor,
    t: Tensor | None,
    weights: Tensor,
    down: Make,
    down_bias: Tensor | None,
    order: ExpertOrder,
    inputs: bool,
    paths: Sequence[ExpertPath] = (),
) -> Tensor:
    """Return the result [T, H]."""
    bias = None if down_bias is None else down_bias.contiguous()
    path = None if t is None else (t, pack_paths(paths, order.offsets.numel() - 1, t.dtype).b)
    rows = rows_product(product, down(), order, transposed=True, bias=bias, path=path)  # [R, H]
    return sum_slots(rows, None if inputs else weights, order)


def _low_rank(
    x: Tensor, paths: Sequence[ExpertPath], order: ExpertOrder, gather: bool = False
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return t = x A^T [R, P] with B, for `rows_product`, and t."""
    if not paths:
        return None, None
    packed = pack_paths(paths, order.offsets.numel() - 1, x.dtype)
    t = rows_product(x, packed.a, order, transposed=True, gather=gather)
    return (t, packed.b), t


def _backward(
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
    want: _Wanted,
    first: _LowRank = _NO_PATHS,
    last: _LowRank = _NO_PATHS,
) -> tuple[Any, ...]:
    """Return the required gradients, in the order of `_Wanted`, and the list of those of the paths. Buffers
    are freed as soon as possible.
    """
    want_h = want.x or want.gate_up or want.gate_up_bias or bool(first.paths)
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = dproduct = path = None
    biased, x, of_first, of_last = {}, as_rows(x), [], []
    if down_bias is not None and experts is not None and want.weights:
        # For all experts at once: reads dy once instead of once per slot.
        biased = {"of_bias": _wide_product(dy, down_bias.T), "experts": experts.contiguous()}
    gather = not (want.down or want.down_bias)
    dy = as_rows(dy) if gather else spread_rows(dy, order)  # [T, H] or [R, H]
    if last.t is not None:
        packed = pack_paths(last.paths, order.offsets.numel() - 1, dy.dtype)
        u = rows_product(dy, packed.b, order, transposed=True, gather=gather)
        path = u, packed.a
    if want_h or want.weights:  # [R, I]
        dproduct = rows_product(dy, down(), order, transposed=False, gather=gather, path=path)
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
    )
    del dproduct
    if last.t is not None:
        by = None if inputs else weights
        of_last = path_gradients(
            last.paths, last.wanted, order, (product, False), (dy, gather), last.t, u, by
        )
    if want.down:
        ddown = weight_product(dy, product, order)
    if want.down_bias:
        ddown_bias = sum_by_expert(dy, weights, order)
    del dy, product, biased
    if want.gate_up:
        dgate_up = weight_product(dh, spread_rows(x, order), order)
    if want.gate_up_bias:
        dgate_up_bias = sum_by_expert(dh, None, order)
    path = None
    if first.t is not None:
        packed = pack_paths(first.paths, order.offsets.numel() - 1, dh.dtype)
        u = rows_product(dh, packed.b, order, transposed=True)
        path = u, packed.a
        of_first = path_gradients(first.paths, first.wanted, order, (x, True), (dh, False), first.t, u)
    if want.x:
        rows = rows_product(dh, gate_up(), order, transposed=False, path=path)
        dx = sum_slots(rows, None, order)
    return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, [*of_first, *of_last]


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in float32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


# torch.compile cannot trace the layer, since the number of rows per expert is a data-dependent shape. These
# two operators expose only static shapes. They sort twice, so that nothing but h passes between them.


@torch.library.custom_op("liger_models::moe_experts", mutates_args=())
def _operator(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    inputs: bool,
) -> tuple[Tensor, Tensor]:
    order, act = sort_by_expert(experts, len(gate_up)), _activation(activation, alpha, limit)
    matrices = _Matrices().given(gate_up, down)
    product, _, h, _ = _activated_product(x, weights, matrices[0], gate_up_bias, order, act, inputs)
    return _summed(product, None, weights, matrices[1], down_bias, order, inputs), h


@_operator.register_fake
def _(x, weights, experts, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit, inputs):
    return x.new_empty(x.shape), x.new_empty(experts.numel(), gate_up.shape[1])


@torch.library.custom_op("liger_models::moe_experts_backward", mutates_args=())
def _backward_operator(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    h: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    inputs: bool,
    wanted: list[bool],
) -> list[Tensor]:
    order, act = sort_by_expert(experts, len(gate_up)), _activation(activation, alpha, limit)
    operands = x, weights, experts, *_Matrices().given(gate_up, down), down_bias, h
    grads = _backward(dy, *operands, order, act, inputs, _Wanted(*wanted))[:-1]
    return [grad for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(dy, x, weights, experts, gate_up, down, down_bias, h, activation, alpha, limit, inputs, wanted):
    num_experts, outputs, hidden = gate_up.shape
    shapes = (x.shape, None, gate_up.shape, down.shape, (num_experts, outputs), (num_experts, hidden))
    return [
        weights.new_empty(weights.shape) if shape is None else x.new_empty(shape)
        for shape, want in zip(shapes, wanted, strict=True)
        if want
    ]


def _activation(name: str, alpha: float, limit: float) -> Activation:
    return ClampedSwiGLU(alpha, limit) if name == "clamped_swiglu" else name


def _setup_context(ctx, inputs, output):
    x, weights, experts, gate_up, down, _, down_bias, *options = inputs
    ctx.save_for_backward(x, weights, experts, gate_up, down, down_bias, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = options


def _differentiate(ctx, dy, _):
    wanted = list(_wanted(ctx.needs_input_grad))
    found = iter(_backward_operator(dy, *ctx.saved_tensors, *ctx.options, wanted))
    dx, dweights, *dexperts = (next(found) if want else None for want in wanted)
    return dx, dweights, None, *dexperts, None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_setup_context)
