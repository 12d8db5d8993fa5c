"""A context in which a token's results do not depend on the rest of the batch.

    with batch_invariant():
        scores = model.score(input_ids, labels)     # the same bits alone, packed, or in another order

Within it, in this thread, matrix products run in blocks of one shape (`blocks.py`), as do torch's reductions
of rows on a GPU and its elementwise functions on a CPU, which round the ends of vectors differently. Our
kernels process rows or documents one by one; the few that choose tiles by the size of the batch ask
`is_batch_invariant`. Operations of torch that mix tokens in ways which depend on the batch are refused.

The backward pass is not affected. (He et al., 2025, "Defeating Nondeterminism in LLM Inference", describes
the problem, and its solution in inference.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from liger_models.kernels.invariant.blocks import by_rows, product

aten = torch.ops.aten


class _State(threading.local):
    active: batch_invariant | None = None
    left_out = 0


_state = _State()


class batch_invariant(TorchDispatchMode):  # a context, as torch.no_grad is
    """Make the results of a token, such as its log-probability, independent of the rest of the batch: bit for
    bit the same alone, packed with other documents, or in another order.

    Applies to this thread, and to forward passes only. Costs of the first products: an experiment for each
    shape of a matrix, which needs memory for a product of 4,096 rows.

    Raises, within the context:
        RuntimeError: an operation that cannot be made invariant: float8 products, convolutions, attention of
            torch outside of our layers, generation with a cache, torch.compile.
    """

    def __enter__(self) -> batch_invariant:
        if torch.compiler.is_compiling():
            raise RuntimeError("batch_invariant() has no effect in compiled code: compile outside of it")
        self._outer, _state.active = _state.active, self
        self._task = torch._C._current_graph_task_id()
        _push_mode(self)  # of this thread alone; torch's own __enter__ also sets variables of the process
        return self

    def __exit__(self, *failed: Any) -> None:
        _pop_mode()
        _state.active = self._outer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else torch would import its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        instead = _INSTEAD.get(func)
        if instead is None or _state.left_out or torch._C._current_graph_task_id() != self._task:
            return func(*args, **kwargs)
        return instead(func, *args, **kwargs)


def is_batch_invariant() -> bool:
    """Whether this thread is within `batch_invariant`."""
    return _state.active is not None


@contextmanager
def without_batch_invariance() -> Iterator[None]:
    """Within `batch_invariant`, let torch's operations run as usual: for gradients, and where results are
    invariant already.
    """
    _state.left_out += 1
    try:
        yield
    finally:
        _state.left_out -= 1


def as_in_this_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it reruns in the backward pass within `batch_invariant` if this call is."""
    if not is_batch_invariant():
        return function

    def run(*args: Any) -> Any:
        if is_batch_invariant() and torch._C._current_graph_task_id() < 0:
            return function(*args)
        with batch_invariant():
            return function(*args)

    return run


def _mm(func: Any, a: Tensor, b: Tensor, out_dtype: Any = None, *, out: Tensor | None = None) -> Tensor:
    return product(a, b, out=out, out_dtype=out_dtype)


def _addmm(
    func: Any,
    c: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: Any = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    if func is aten.addmm_.default:
        out = c
    return product(a, b, c, beta=beta, alpha=alpha, out=out, out_dtype=out_dtype)


def _bmm(func: Any, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    if a.device.type != "cpu":
        return _refuse(func)
    found = [product(x, y.contiguous()) for x, y in zip(a, b, strict=True)]
    result = torch.stack(found) if found else a.new_empty(0, a.shape[1], b.shape[2])
    return result if out is None else out.copy_(result)


def _decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Decompose an operation, which torch does not do in inference mode."""
    with batch_invariant():
        return func.decompose(*args, **kwargs)


def _of_rows(func: Any, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A reduction of torch, whose order of sums on a GPU depends on the number of rows."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    if x.device.type == "cpu" or not x.is_floating_point() or x.dim() < 2 or "out" in kwargs:
        return func(x, dim, *args, **kwargs)
    if any(d % x.dim() == 0 for d in dims):  # over the batch
        return func(x, dim, *args, **kwargs)
    return by_rows(lambda rows: func(rows, dim, *args, **kwargs), x)


_PIECE = 1 << 15  # elements, which torch leaves to one thread


def _elementwise(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function on a CPU, in whole vectors of elements."""
    if x.device.type != "cpu" or not x.is_floating_point() or "out" in kwargs:
        return func(x, *args, **kwargs)
    flat = x.reshape(-1)
    padded = torch.cat([flat, flat.new_ones(-len(flat) % 64)])
    parts = [func(piece, *args, **kwargs) for piece in padded.split(_PIECE)]
    return torch.cat(parts)[: len(flat)].view(x.shape) if parts else func(x, *args, **kwargs)


def _elementwise_in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.device.type != "cpu":
        return func(x, *args, **kwargs)
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    return x.copy_(_elementwise(getattr(aten, name).default, x, *args, **kwargs))


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"{func} cannot run in batch_invariant(): its result for a token may depend on the rest of the "
        "batch. The layers of liger_models do not need it, except for float8, attention to cached tokens and "
        "convolutions of images; leave the context for those."
    )


def _overloads(*names: str) -> list[Any]:
    """The overloads of operations of torch, as far as the installed version has them."""
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


_FUNCTIONS = ("sigmoid", "silu", "gelu", "tanh", "softplus", "exp", "expm1", "log", "log1p", "rsqrt", "erf")

_INSTEAD: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_overloads("mm"), _mm),
    **dict.fromkeys(_overloads("addmm", "addmm_"), _addmm),
    **dict.fromkeys((aten.bmm.default, aten.bmm.out), _bmm),
    **dict.fromkeys((aten.linear.default, aten.matmul.default), _decompose),
    **dict.fromkeys(
        (
            *(aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default, aten._softmax.default),
            *(aten._log_softmax.default, aten.var.correction, aten.cumsum.default),
        ),
        _of_rows,
    ),
    **{getattr(aten, name).default: _elementwise for name in _FUNCTIONS},
    **{
        getattr(aten, f"{name}_").default: _elementwise_in_place
        for name in _FUNCTIONS
        if hasattr(aten, f"{name}_")
    },
    **dict.fromkeys(
        _overloads(
            *("baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "dot", "_addmm_activation", "convolution"),
            *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
            *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            *("_scaled_dot_product_attention_math", "_flash_attention_forward", "_cudnn_attention_forward"),
            *("_efficient_attention_forward", "_scaled_dot_product_fused_attention_overrideable"),
        ),
        _refuse,
    ),
}
