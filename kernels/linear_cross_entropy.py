"""Cross entropy of a linear layer's output, `x @ weight.T + bias`, whose logits never exist all at once.

The loss of a row of logits and its gradient are those of `cross_entropy`. Tokens are taken in chunks:

    logits = x W^T + b,  losses, and dlogits written over the logits,  dx = dlogits W,  dW += dlogits^T x

so the forward pass already holds the gradients for an upstream gradient of one, and the backward pass has
only to multiply by the true one. That takes the three matrix products that a backward needs, none of them
twice. Tokens without a label are left out of the products. Memory beside the results: a chunk of logits,
and the float32 sum of dW if there is more than one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    at_least_float32,
    graph_is_kept,
    jit,
    on_device_of,
    tl,
    triton,
    use_triton,
)
from liger_models.kernels.cross_entropy import (
    LossOptions,
    check_options,
    check_weights,
    cross_entropy_plain,
    loss_denominator,
    raise_label_error,
    row_losses,
)

# Room for a chunk of logits and for what the float32 sum of dW takes beyond dW itself. An H200 computes dW at
# 561, 614, 633 TFLOP/s from chunks of 2,048, 4,096, 8,192 tokens (hidden size 4096, vocabulary 128,256,
# bfloat16 summed in float32). There, 2 GiB gives one chunk to 8,192 tokens, and chunks of 4,096 to more.
CHUNK_BYTES = 2 << 30
_FEWEST_TOKENS = 1024  # in a chunk: below, moving the sum of dW takes longer than its product


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """cross_entropy(x @ weight.T + bias, labels), in float32 (float64 for float64 inputs).

    x [..., H]; weight [V, H] and bias [V] of x's dtype, or of any under autocast, whose dtype the products
    then take; labels [...], int64 or int32, in [0, V) or equal to `ignore_index`. class_weight [V] and
    token_weights [...] are constants to autograd. Reductions and options are those of `cross_entropy`: the
    mean over no valid token is nan.

    Gradients are computed for those of x, weight and bias that require them, in the forward pass; with
    reduction "none" in the backward pass, which makes the logits again. Sums over tokens are in float32 and
    rounded once.

    num_valid is the count of labels that differ from `ignore_index`. A caller who knows it, and that all
    labels lie in the vocabulary, spares a GPU the wait for both; a label outside then makes the loss nan.
    Else they are counted and checked: IndexError. A CUDA graph cannot wait: without num_valid, labels are not
    checked there, and ignored tokens stay in the products.

    chunk_bytes is the memory to spend beside the results; a chunk has 1,024 tokens at least, however little
    that is.

    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    """
    options = LossOptions(ignore_index, float(label_smoothing), float(z_loss), softcap, float(logit_scale))
    check_options(options, reduction, num_items)
    _check_operands(x, weight, labels, bias)
    check_weights(labels, len(weight), class_weight, token_weights)
    shape, labels, x = labels.shape, labels.reshape(-1), x.reshape(-1, x.shape[-1])
    if token_weights is not None:
        token_weights = at_least_float32(token_weights.detach().reshape(-1))
    dtype = _product_dtype(x, weight, bias)
    plan = _Plan(options, dtype, chunk_bytes, num_valid)
    if reduction == "none":
        losses = _TokenLosses.apply(x, weight, bias, labels, class_weight, plan)
        return (losses if token_weights is None else losses * token_weights).view(shape)
    accumulate = at_least_float32(x.new_empty(0)).dtype
    if reduction == "sum":
        inverse = torch.ones((), dtype=accumulate, device=x.device)
    else:
        if num_items is None and class_weight is None and token_weights is None:
            num_items = num_valid
        inverse = loss_denominator(
            labels, ignore_index, class_weight, token_weights, num_items, accumulate
        ).reciprocal()
    wanted = tuple(
        torch.is_grad_enabled() and operand is not None and operand.requires_grad
        for operand in (x, weight, bias)
    )
    return _ReducedLoss.apply(x, weight, bias, labels, class_weight, token_weights, inverse, plan, wanted)


def linear_cross_entropy_plain(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    **options,
) -> Tensor:
    """The plain twin of `linear_cross_entropy`, with the options of `cross_entropy`: all logits at once."""
    logits = torch.nn.functional.linear(x, weight, bias)
    losses = cross_entropy_plain(logits.flatten(0, -2), labels.flatten(), weight=class_weight, **options)
    assert isinstance(losses, Tensor)
    return losses.view(labels.shape) if losses.dim() else losses


class _Plan(NamedTuple):
    options: LossOptions
    dtype: torch.dtype  # of the products
    chunk_bytes: int
    num_valid: int | None


class _ReducedLoss(torch.autograd.Function):
    """The sum of all rows' losses times `inverse`; its gradients wait in ctx for the upstream one."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, token_weights, inverse, plan, wanted):
        # float16 would lose gradients divided by the count of tokens: there the divisor waits for the
        # backward pass, where it meets the loss scale that is meant to keep gradients in range.
        late = plan.dtype == torch.float16
        grad_scale = torch.ones_like(inverse) if late else inverse
        grad_scale = grad_scale.reshape(1) if token_weights is None else grad_scale * token_weights
        losses, *grads = _chunked(
            x, weight, bias, labels, class_weight, grad_scale, plan, wanted, round_dw=not late
        )
        ctx.dtypes = [
            operand.dtype if want else None for operand, want in zip((x, weight, bias), wanted, strict=True)
        ]
        ctx.grads = grads
        ctx.inverse = inverse if late else None
        ctx.set_materialize_grads(False)
        return (losses if token_weights is None else losses * token_weights).sum() * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return *release_gradients(ctx, upstream), *(None,) * 6


class _TokenLosses(torch.autograd.Function):
    """Each row's loss. The rows' upstream gradients enter every sum, so backward makes the logits anew."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, plan):
        ctx.save_for_backward(x, weight, bias, labels, class_weight)
        ctx.plan = plan
        return _chunked(x, weight, bias, labels, class_weight, None, plan, (False,) * 3)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        x, weight, bias, labels, class_weight = ctx.saved_tensors
        grads = _chunked(
            x, weight, bias, labels, class_weight, upstream.contiguous(), ctx.plan, ctx.needs_input_grad[:3]
        )
        return *grads[1:], None, None, None


def _chunked(x, weight, bias, labels, class_weight, grad_scale, plan, wanted, round_dw=True):
    """The loss of each row [T], and the gradients of grad_scale ([1] or [T]) times it where they are wanted.

    dW and dbias have their operands' dtypes, or are left in float32 if not round_dw.
    """
    if torch.compiler.is_compiling():
        results = _chunked_op(
            x, weight, bias, labels, class_weight, grad_scale, *plan.options, *plan[1:], *wanted, round_dw
        )
        return results[0], *(grad if want else None for grad, want in zip(results[1:], wanted, strict=True))

    want_dx, want_dw, want_db = wanted
    options, dtype = plan.options, plan.dtype
    index = _valid_rows(labels, len(weight), options.ignore_index, plan.num_valid)
    rows, vocab = len(labels) if index is None else len(index), len(weight)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    sum_bytes = weight.numel() * (sum_dtype.itemsize - weight.itemsize) if want_dw else 0
    size = _chunk_size(rows, vocab * dtype.itemsize, sum_bytes, plan.chunk_bytes)
    dw_dtype = weight.dtype if round_dw and size >= rows and weight.dtype == dtype else sum_dtype

    losses = torch.zeros(len(x), dtype=sum_dtype, device=x.device)
    dx = dw = db = None
    if want_dx:
        dx = torch.empty_like(x) if index is None else torch.zeros_like(x)
    if want_dw:
        dw = (torch.empty if rows else torch.zeros)(weight.shape, dtype=dw_dtype, device=x.device)
    if want_db:
        db = torch.zeros(vocab, dtype=sum_dtype, device=x.device)

    to_logits = weight.to(dtype)
    padded_vocab = -(-vocab // 64) * 64  # so that every row of logits is aligned
    buffer = torch.empty(size, padded_vocab, dtype=dtype, device=x.device)[:, :vocab]
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        chunk = part if index is None else index[part]
        x_chunk, labels_chunk = x[chunk].to(dtype), labels[chunk]
        logits = buffer[: len(x_chunk)]
        if bias is None:
            torch.mm(x_chunk, to_logits.t(), out=logits)
        else:
            torch.addmm(bias.to(dtype), x_chunk, to_logits.t(), out=logits)
        scale = None
        if any(wanted):
            scale = grad_scale if len(grad_scale) == 1 else grad_scale[chunk]
        losses[chunk], _ = row_losses(logits, labels_chunk, class_weight, options, scale)
        dlogits = logits  # by now overwritten
        if dx is not None:
            dx[chunk] = torch.mm(dlogits, to_logits).to(dx.dtype)
        if dw is not None:
            _add_product(dw, dlogits.t(), x_chunk, first=start == 0)
        if db is not None:
            db += dlogits.sum(0, dtype=sum_dtype)
        del logits, dlogits  # views that would keep the buffer alive
    del buffer  # make room for the rounded dW
    if round_dw:
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None else db.to(bias.dtype)
    return losses, dx, dw, db


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or total = a @ b if first, never rounding a float32 total's products to less."""
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _chunk_size(rows: int, row_bytes: int, sum_bytes: int, chunk_bytes: int) -> int:
    """Tokens in a chunk: all if their logits fit, else equal parts beside the float32 sum of dW."""
    if rows * row_bytes <= chunk_bytes:
        return max(rows, 1)
    most = max((chunk_bytes - sum_bytes) // row_bytes, _FEWEST_TOKENS)
    size = -(-rows // -(-rows // most))
    return min(-(-size // 128) * 128, rows)


def _valid_rows(labels: Tensor, vocab_size: int, ignore_index: int, num_valid: int | None) -> Tensor | None:
    """The indices of the rows to take; None if all are."""
    if num_valid is None and labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if num_valid is None or not labels.is_cuda:
        valid = labels != ignore_index
        outside = ((labels < 0) | (labels >= vocab_size)) & valid
        counted, num_outside = torch.stack([valid.sum(), outside.sum()]).tolist()  # the one wait for the GPU
        if num_outside:
            raise_label_error(labels, outside, vocab_size, ignore_index)
        if num_valid not in (None, counted):
            raise ValueError(f"num_valid is {num_valid}, but {counted} labels differ from {ignore_index}")
        num_valid = counted
    if num_valid == len(labels):
        return None
    # A stable sort puts the valid rows first, in their order; unlike nonzero it needs no count from the GPU.
    return torch.sort(labels == ignore_index, stable=True).indices[:num_valid]


@torch.library.custom_op("liger_models::linear_cross_entropy", mutates_args=())
def _chunked_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
    round_dw: bool,
) -> list[Tensor]:
    """`_chunked` as one operation of a compiled graph; a gradient that is not wanted is an empty tensor."""
    plan = _Plan(
        LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale),
        dtype,
        chunk_bytes,
        num_valid,
    )
    results = _chunked(
        x, weight, bias, labels, class_weight, grad_scale, plan, (want_dx, want_dw, want_db), round_dw
    )
    return [x.new_empty(0) if result is None else result for result in results]


@_chunked_op.register_fake
def _(x, weight, bias, labels, class_weight, grad_scale, *rest):
    dtype, (want_dx, want_dw, want_db, round_dw) = rest[5], rest[-4:]
    sum_dtype = torch.promote_types(dtype, torch.float32)

    def grad(want, operand):
        if not want:
            return x.new_empty(0)
        dtype = operand.dtype if round_dw or operand is x else sum_dtype
        return operand.new_empty(operand.shape, dtype=dtype)

    losses = x.new_empty(len(x), dtype=sum_dtype)
    return [losses, grad(want_dx, x), grad(want_dw, weight), grad(want_db, bias)]


def release_gradients(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """`ctx.grads`, made in the forward pass for an upstream gradient of one, times the true one.

    They leave ctx unless the graph is retained. `ctx.dtypes` are theirs; `ctx.inverse` is a divisor's inverse
    that waits for the backward pass, or None.
    """
    if upstream is None:
        return (None,) * len(ctx.dtypes)
    if ctx.grads is None:
        raise RuntimeError(
            "the gradients of this loss were used up by an earlier backward; call that one with "
            "retain_graph=True to go through the graph again"
        )
    grads, factor = ctx.grads, upstream if ctx.inverse is None else upstream * ctx.inverse
    keep = graph_is_kept()
    if not keep:
        ctx.grads = None  # a gradient that nobody else holds moves into .grad without a copy
    return tuple(_scaled(grad, factor, dtype, keep) for grad, dtype in zip(grads, ctx.dtypes, strict=True))


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype | None, keep: bool) -> Tensor | None:
    """grad * factor in dtype; in grad's own memory unless that is to be kept."""
    if grad is None:
        return None
    if keep or grad.dtype != dtype:
        return (grad * factor).to(dtype)
    if not use_triton(grad):
        return grad.mul_(factor)
    if grad.numel():
        with on_device_of(grad):
            _scale_kernel[(triton.cdiv(grad.numel(), _SCALE_BLOCK),)](
                grad, factor, grad.numel(), BLOCK=_SCALE_BLOCK
            )
    return grad


def _check_operands(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"found x {list(x.shape)} and weight {list(weight.shape)}; expected x [..., H] and weight [V, H]"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}; expected one a token, {list(x.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}; expected {list(weight.shape[:1])}")


def _product_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the products: that of autocast where it is on (float64 it leaves alone), else x's."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    dtypes = [operand.dtype for operand in (x, weight, bias) if operand is not None]
    if len(set(dtypes)) > 1 or not x.is_floating_point():
        raise TypeError(
            f"x, weight and bias are {dtypes}; expected one floating dtype: cast them, or use autocast"
        )
    return x.dtype


_SCALE_BLOCK = 4096


@jit
def _scale_kernel(values_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """Multiply in place, and do not touch the values where the factor is exactly one."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + offsets, mask=offsets < count)
    tl.store(values_ptr + offsets, (values.to(tl.float32) * factor).to(values.dtype), mask=offsets < count)
