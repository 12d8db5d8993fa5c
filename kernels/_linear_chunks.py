"""A linear layer's output, `x @ weight.T + bias`, taken in chunks of tokens, and the gradients of what is
made of it. What is made of a chunk, and the gradient that it leaves over the chunk, is its caller's `step`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.kernels.linear_cross_entropy import _add_product, _chunk_size


class LogitsBuffer:
    """Room for a chunk of logits, used again for every chunk."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int):
        vocab = len(weight)
        padded_vocab = -(-vocab // 64) * 64  # so that every row is aligned
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.rows = torch.empty(rows, padded_vocab, dtype=dtype, device=weight.device)[:, :vocab]

    def fill(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias, valid until the next call.  x [rows, H] -> [rows, V]"""
        logits = self.rows[: len(x)]
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=logits)
        return torch.addmm(self.bias, x, self.weight.t(), out=logits)


def in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor | None,
    step: Callable[[Tensor, slice | Tensor], None],
    *,
    dtype: torch.dtype,
    row_bytes: int,
    chunk_bytes: int,
    wanted: tuple[bool, bool, bool] = (False, False, False),
    round_dw: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Call step(logits, chunk) on the logits of each chunk of x's rows; give dx, dw, dbias where wanted.

    x [T, H]; index holds the rows to take, None for all; `chunk` indexes [T]. Where a gradient is wanted the
    step leaves that of the logits in their place. dtype is that of the products, and row_bytes what a row
    of a chunk takes, all buffers counted. dw and dbias have their operands' dtypes, or float32 if not
    round_dw.
    """
    want_dx, want_dw, want_db = wanted
    rows, vocab = len(x) if index is None else len(index), len(weight)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    sum_bytes = weight.numel() * (sum_dtype.itemsize - weight.itemsize) if want_dw else 0
    size = _chunk_size(rows, row_bytes, sum_bytes, chunk_bytes)
    dw_dtype = weight.dtype if round_dw and size >= rows and weight.dtype == dtype else sum_dtype

    dx = dw = db = None
    if want_dx:
        dx = torch.empty_like(x) if index is None else torch.zeros_like(x)
    if want_dw:
        dw = (torch.empty if rows else torch.zeros)(weight.shape, dtype=dw_dtype, device=x.device)
    if want_db:
        db = torch.zeros(vocab, dtype=sum_dtype, device=x.device)

    buffer = LogitsBuffer(weight, bias, dtype, min(size, rows))
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        chunk = part if index is None else index[part]
        x_chunk = x[chunk].to(dtype)
        logits = buffer.fill(x_chunk)
        step(logits, chunk)
        if dx is not None:
            dx[chunk] = torch.mm(logits, buffer.weight).to(dx.dtype)
        if dw is not None:
            _add_product(dw, logits.t(), x_chunk, first=start == 0)
        if db is not None:
            db += logits.sum(0, dtype=sum_dtype)
        del logits  # a view that would keep the buffer alive
    del buffer  # make room for the rounded dw
    if round_dw:
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None or bias is None else db.to(bias.dtype)
    return dx, dw, db
