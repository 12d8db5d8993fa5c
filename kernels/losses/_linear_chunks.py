"""Shared machinery of the losses of a linear layer's output, `x @ weight.T + bias`.

The full logits never exist at once: `in_chunks` computes them for some tokens at a time, calls `step`, and
accumulates the gradient that `step` writes in their place into dx, dW and dbias. Tokens without a label are
left out of all products.

A loss that is a sum over tokens computes its gradients in the forward pass, for an upstream gradient of one
(`reduced_forward`); the backward pass only multiplies by the true one (`release_gradients`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    autocasts,
    ceil_div,
    graph_is_kept,
    jit,
    on_device_of,
    tl,
    use_triton,
)
from liger_models.kernels._gpu import on_gpu
from liger_models.kernels.invariant.mode import without_batch_invariance
from liger_models.kernels.losses._reductions import raise_label_error

# Memory for a chunk of logits and the float32 sum of dW in excess of dW itself. An H200 computes dW at 561,
# 614, 633 TFLOP/s from chunks of 2,048, 4,096, 8,192 tokens (hidden size 4096, vocabulary 128,256, bfloat16
# accumulated in float32). There, 2 GiB gives one chunk for 8,192 tokens, and chunks of 4,096 for more.
CHUNK_BYTES = 2 << 30
_FEWEST_TOKENS = 1024  # per chunk: below, moving the sum of dW takes longer than its product
# Without dW longer chunks bring nothing: with 1,024 tokens, products for logits and dx run at full speed.
FROZEN_CHUNK_BYTES = 256 << 20


class Linear(NamedTuple):
    """A linear layer and its input."""

    x: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    dtype: torch.dtype  # of the products
    logits_dtype: torch.dtype | None = None  # None: the products' dtype; float32: not rounded

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of logits."""
        return len(self.weight) * (self.logits_dtype or self.dtype).itemsize


def gradient_view(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """View for the gradient of logits [N, V], in the products' dtype, within the logits' memory: each row
    begins where the row of logits does."""
    return logits if logits.dtype == dtype else logits.view(dtype)[:, : logits.shape[1]]


def in_chunks(
    linear: Linear,
    index: Tensor | None,
    step: Callable[..., None],
    *,
    chunk_bytes: int,
    wanted: tuple[bool, bool, bool] = (False, False, False),
    round_dw: bool = True,
    teacher: Linear | None = None,
    kept: KeptLogits | None = None,
) -> list[Tensor | None]:
    """Call step(chunk, logits) for each chunk of x's rows; return dx, dw, dbias where wanted.

    index holds the rows to process, None for all; `chunk` indexes [T]. If gradients are wanted, the step
    writes the logits' gradient into their `gradient_view`. With a teacher, a layer over the same tokens
    without gradients, the call is step(chunk, logits, teacher_logits). dw and dbias have their operands'
    dtypes, or float32 if not round_dw. A pass without gradients leaves its last chunk's logits in `kept`, and
    the following pass with gradients begins with them.
    """
    x, weight, bias, dtype, _ = linear
    want_dx, want_dw, want_db = wanted
    rows, vocab = len(x) if index is None else len(index), len(weight)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    trained = want_dw or (kept is not None and kept.want_dw)
    sum_bytes = weight.numel() * (sum_dtype.itemsize - weight.itemsize) if trained else 0
    row_bytes = linear.row_bytes + (0 if teacher is None else teacher.row_bytes)
    if not trained:
        chunk_bytes = min(chunk_bytes, FROZEN_CHUNK_BYTES)
    size = _chunk_size(rows, row_bytes, sum_bytes, chunk_bytes)
    dw_dtype = weight.dtype if round_dw and size >= rows and weight.dtype == dtype else sum_dtype

    dx = dw = db = None
    if want_dx:
        dx = torch.empty_like(x) if index is None else torch.zeros_like(x)
    if want_dw:
        dw = (torch.empty if rows else torch.zeros)(weight.shape, dtype=dw_dtype, device=x.device)
    if want_db:
        db = torch.zeros(vocab, dtype=sum_dtype, device=x.device)

    starts, made = list(range(0, rows, size)), None
    if kept is not None and any(wanted):
        starts, made = starts[::-1], kept.take()
    buffer = _LogitsBuffer(linear, min(size, rows), made)
    teacher_buffer = None if teacher is None else _LogitsBuffer(teacher, min(size, rows))
    for start in starts:
        part = slice(start, min(start + size, rows))
        chunk = part if index is None else index[part]
        x_chunk = _without_gaps(x[chunk].to(dtype))
        logits = buffer.rows[: len(x_chunk)] if made is not None else buffer.fill(x_chunk)
        made = None
        if teacher is None or teacher_buffer is None:
            step(chunk, logits)
        else:
            step(chunk, logits, teacher_buffer.fill(_without_gaps(teacher.x[chunk].to(teacher.dtype))))
        dlogits = _safe_to_multiply(gradient_view(logits, dtype)) if any(wanted) else logits
        with without_batch_invariance():
            if dx is not None:
                if isinstance(chunk, slice) and dx.dtype == dtype:
                    torch.mm(dlogits, buffer.weight, out=dx[chunk])
                else:
                    dx[chunk] = torch.mm(dlogits, buffer.weight).to(dx.dtype)
            if dw is not None:
                add_product(dw, dlogits.t(), x_chunk, first=start == starts[0])
            if db is not None:
                db += dlogits.sum(0, dtype=sum_dtype)
        del logits, dlogits  # views keep the buffer alive
    if kept is not None and not any(wanted):
        kept.put(buffer.rows)
    del buffer, teacher_buffer  # free memory for the rounded dw
    if round_dw:
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None or bias is None else db.to(bias.dtype)
    return [dx, dw, db]


# CPU matrix libraries read a row in tiles. The last tile may reach into the gap before the next row and
# multiply its contents by zero: with AMX in bfloat16, a nan in uninitialised memory becomes nan in the
# product. cuBLAS does not read there, and needs aligned rows.
_TILE = 64  # columns


def _safe_to_multiply(gradient: Tensor) -> Tensor:
    """Gradient of logits [N, V] with finite numbers in the gaps between rows, or without gaps on a CPU."""
    if not on_gpu(gradient):
        return _without_gaps(gradient)
    vocab = gradient.shape[1]
    if gap := -vocab % _TILE:
        shape = (len(gradient), gap)
        gradient.as_strided(shape, gradient.stride(), gradient.storage_offset() + vocab).zero_()
    return gradient


def _without_gaps(x: Tensor) -> Tensor:
    """On a CPU, matrix x or a copy of it whose rows, or columns, are adjacent in memory."""
    return x if on_gpu(x) or x.t().is_contiguous() else x.contiguous()


class KeptLogits:
    """Logits of a forward pass's last chunk, reused by its backward pass to save a product.

    They occupy the buffer that the backward pass would allocate for a chunk. Each device holds those of the
    latest forward pass only; earlier ones are recomputed.
    """

    _latest: ClassVar[weakref.WeakValueDictionary[torch.device, KeptLogits]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device, want_dw: bool):
        """For a forward pass about to begin, whose backward pass computes dW if `want_dw`."""
        self.want_dw = want_dw
        self._rows: Tensor | None = None
        if (earlier := self._latest.get(device)) is not None:
            earlier.take()
        self._latest[device] = self

    def put(self, rows: Tensor) -> None:
        self._rows = rows

    def take(self) -> Tensor | None:
        """Remove and return the logits; None if they are gone."""
        rows, self._rows = self._rows, None
        return rows


class _LogitsBuffer:
    """Buffer for a chunk of logits, reused by every chunk."""

    def __init__(self, linear: Linear, rows: int, made: Tensor | None = None):
        dtype, vocab = linear.dtype, len(linear.weight)
        self.weight = _without_gaps(linear.weight.detach().to(dtype))
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        padded_vocab = ceil_div(vocab, _TILE) * _TILE if on_gpu(self.weight) else vocab
        if made is None:
            logits_dtype = linear.logits_dtype or dtype
            made = torch.empty(rows, padded_vocab, dtype=logits_dtype, device=self.weight.device)[:, :vocab]
        self.rows = made

    def fill(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, valid until the next call.  x [rows, H] -> [rows, V]"""
        logits = self.rows[: len(x)]
        if logits.dtype != x.dtype:
            if self.bias is not None:
                logits.copy_(self.bias)
            add_product(logits, x, self.weight.t(), first=self.bias is None)
            return logits
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=logits)
        return torch.addmm(self.bias, x, self.weight.t(), out=logits)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or total = a @ b if first, never rounding a float32 total's products to less."""
    beta = 0 if first else 1
    if total.is_meta:
        return  # torch 2.11 has no product of meta tensors with another dtype
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif on_gpu(total):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _chunk_size(rows: int, row_bytes: int, sum_bytes: int, chunk_bytes: int) -> int:
    """Tokens in a chunk: all if their logits fit, else equal parts next to the float32 sum of dW.

    Let S be the sum's bytes in excess of dW, which equal dW's bytes in 16 bits. Several chunks take at least
    3 S: the sum, and at the end its rounded copy. A single chunk with 2 S of logits next to dW takes as much,
    and so do several with S of logits, so neither raises the peak.
    """
    if rows * row_bytes <= max(chunk_bytes, 2 * sum_bytes):
        return max(rows, 1)
    most = max(max(chunk_bytes - sum_bytes, sum_bytes) // row_bytes, _FEWEST_TOKENS)
    size = -(-rows // -(-rows // most))
    return min(-(-size // 128) * 128, rows)


def working_bytes(
    rows: int,
    hidden_size: int,
    vocab_size: int,
    itemsize: int,
    trained: bool = True,
    labels: int | None = None,
) -> int:
    """Peak memory of a loss over `rows` tokens, dx and dW included (dW if the layer is trained), with
    `itemsize` bytes per operand element. `labels` of the tokens have a label; None: all.
    """
    row_bytes, elements = vocab_size * itemsize, vocab_size * hidden_size
    wide = 4 if itemsize < 4 else itemsize
    sum_bytes = elements * (wide - itemsize) if trained else 0
    count = rows if labels is None else min(labels, rows)
    size = _chunk_size(count, row_bytes, sum_bytes, CHUNK_BYTES if trained else FROZEN_CHUNK_BYTES)
    dw = elements * (wide if size < count else itemsize) if trained else 0
    rounded = elements * itemsize if dw > elements * itemsize else 0
    # Per chunk: its logits and, if tokens are left out, the labelled tokens and their gradients.
    chunk = min(size, count) * (row_bytes + 2 * hidden_size * itemsize)
    return rows * hidden_size * itemsize + dw + max(chunk, rounded)


def part_of(values: Tensor | None, chunk: slice | Tensor) -> Tensor | None:
    """A chunk's part of a vector [T]; a single value applies to all tokens."""
    return values if values is None or len(values) == 1 else values[chunk]


def valid_rows(labels: Tensor, vocab_size: int, ignore_index: int, num_valid: int | None) -> Tensor | None:
    """Indices of the rows to process; None for all, also where so few have no label that their products take
    less time than copies without them. IndexError for a label outside the vocabulary.
    """
    if num_valid is None and labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if num_valid is None or not on_gpu(labels):
        valid = labels != ignore_index
        outside = ((labels < 0) | (labels >= vocab_size)) & valid
        counted, num_outside = torch.stack([valid.sum(), outside.sum()]).tolist()  # the only synchronisation
        if num_outside:
            raise_label_error(labels, outside, vocab_size, ignore_index)
        if num_valid not in (None, counted):
            raise ValueError(f"num_valid is {num_valid}, but {counted} labels differ from {ignore_index}")
        num_valid = counted
    if not 0 <= num_valid <= len(labels):
        raise ValueError(f"num_valid is {num_valid}; expected 0 to {len(labels)}, the number of labels")
    if len(labels) - num_valid <= len(labels) // 128:
        return None
    # A stable sort moves the valid rows to the front in order; unlike nonzero it does not synchronise.
    return torch.sort(labels == ignore_index, stable=True).indices[:num_valid]


def check_operands(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError for incompatible shapes: x [..., H], weight [V, H], labels [...], bias [V]."""
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"found x {list(x.shape)} and weight {list(weight.shape)}; expected x [..., H] and weight [V, H]"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}; expected one per token, {list(x.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}; expected {list(weight.shape[:1])}")


def product_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """Dtype of the products: autocast's if it is on (float64 stays float64), else x's."""
    if autocasts(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    dtypes = [operand.dtype for operand in (x, weight, bias) if operand is not None]
    if len(set(dtypes)) > 1 or not x.is_floating_point():
        raise TypeError(
            f"x, weight and bias are {dtypes}; expected one floating dtype: cast them, or use autocast"
        )
    return x.dtype


def gradients_wanted(*operands: Tensor | None) -> tuple[bool, ...]:
    """Whether the forward pass computes a gradient for each operand."""
    return tuple(
        torch.is_grad_enabled() and operand is not None and operand.requires_grad for operand in operands
    )


def reduced_forward(
    ctx: Any,
    operands: tuple[Tensor, Tensor, Tensor | None],
    wanted: tuple[bool, bool, bool],
    dtype: torch.dtype,
    inverse: Tensor,
    token_weights: Tensor | None,
    chunked: Callable[[Tensor, bool], Sequence[Tensor | None]],
) -> tuple[Tensor, list[Tensor | None]]:
    """Sum of all rows' losses times `inverse`, and other results; gradients are stored in ctx.

    chunked(grad_scale, round_dw) returns the losses [T], other results, and the gradients of grad_scale ([1]
    or [T]) times the losses for x, weight and bias where `wanted`. dtype is the products'; `inverse` has no
    dimensions; token_weights [T] are factors of the losses.
    """
    # float16 would underflow in gradients divided by the token count: the divisor is then applied in the
    # backward pass, after the loss scale that keeps gradients in range.
    late = dtype == torch.float16
    grad_scale, late_scale = inverse, None
    if late:
        # 1 / 0 tokens is applied now: later it would turn zero gradients into nan.
        infinite = inverse.isinf()
        grad_scale, late_scale = inverse.where(infinite, 1.0), inverse.masked_fill(infinite, 1.0)
    grad_scale = grad_scale.reshape(1) if token_weights is None else grad_scale * token_weights
    losses, *others, dx, dw, db = chunked(grad_scale, not late)
    assert losses is not None
    ctx.grads = [dx, dw, db]
    ctx.dtypes = [
        None if operand is None or not want else operand.dtype
        for operand, want in zip(operands, wanted, strict=True)
    ]
    ctx.late_scale = late_scale
    ctx.set_materialize_grads(False)
    return (losses if token_weights is None else losses * token_weights).sum() * inverse, others


def release_gradients(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients that `reduced_forward` computed for an upstream gradient of one, times the true one.

    They are removed from ctx unless the graph is retained.
    """
    if upstream is None:
        return (None,) * len(ctx.dtypes)
    if ctx.grads is None:
        raise RuntimeError(
            "the gradients of this loss were freed by an earlier backward pass; call that one with "
            "retain_graph=True to run backward again"
        )
    grads, factor = ctx.grads, upstream if ctx.late_scale is None else upstream * ctx.late_scale
    keep = graph_is_kept()
    if not keep:
        ctx.grads = None  # an unshared gradient moves into .grad without a copy
    return tuple(_scaled(grad, factor, dtype, keep) for grad, dtype in zip(grads, ctx.dtypes, strict=True))


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype | None, keep: bool) -> Tensor | None:
    """grad * factor in dtype, in place unless `keep`."""
    if grad is None:
        return None
    if keep or grad.dtype != dtype:
        return (grad * factor).to(dtype)
    if not use_triton(grad):
        return grad.mul_(factor)
    if grad.numel():
        with on_device_of(grad):
            programs = ceil_div(grad.numel(), _SCALE_BLOCK * _SCALE_BLOCKS)
            _scale_kernel[(programs,)](grad, factor, grad.numel(), BLOCK=_SCALE_BLOCK, BLOCKS=_SCALE_BLOCKS)
    return grad


_SCALE_BLOCK = 4096
_SCALE_BLOCKS = 16  # per program: with a factor of one, a launch only starts programs


@jit
def _scale_kernel(values_ptr, factor_ptr, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Multiply in place; leaves the values untouched if the factor is exactly one."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in range(BLOCKS):
        offsets = first + block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + offsets, mask=offsets < count)
        values = (values.to(tl.float32) * factor).to(values.dtype)
        tl.store(values_ptr + offsets, values, mask=offsets < count)


# A custom op returns tensors only, so absent ones are empty under torch.compile.


def fill_absent(results: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Results of a custom op, with an empty tensor for each absent one."""
    return [like.new_empty(0) if result is None else result for result in results]


def drop_absent(results: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
    """Inverse of `fill_absent`."""
    return [result if there else None for result, there in zip(results, present, strict=True)]


def fake_gradients(
    operands: Sequence[Tensor | None], wanted: Sequence[bool], dtype: torch.dtype, round_dw: bool = True
) -> list[Tensor]:
    """Fake results of `in_chunks`, up to a dtype, in the form of `fill_absent`."""
    x = operands[0]
    assert x is not None
    sum_dtype = torch.promote_types(dtype, torch.float32)
    grads = [
        operand.new_empty(operand.shape, dtype=operand.dtype if round_dw or operand is x else sum_dtype)
        if want and operand is not None
        else None
        for operand, want in zip(operands, wanted, strict=True)
    ]
    return fill_absent(grads, x)
