"""Log-probabilities of given tokens, and entropies of the distributions they were drawn from, out of hidden
states, for reinforcement learning. The logits never exist all at once.

For a token with hidden state x and label y, let z = softcap * tanh(logit_scale * (x W^T + b) / softcap) / T,
p = softmax(z):

    log_prob = log p_y = z_y - lse,   entropy = H = - sum_c p_c log p_c
    d log_prob / dz_c = [c = y] - p_c,   dH / dz_c = - p_c (log p_c + H)

Tokens are taken in chunks. The forward keeps a log-sum-exp, a log-probability and an entropy for each; the
backward makes a chunk's logits again and writes their gradient over them: four matrix products in all. Tokens
without a label are left out of them. Memory beside the results: a chunk of logits, and the float32 sum of dW
if there is more than one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    at_least_float32,
    ceil_div,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)
from liger_models.kernels.losses._linear_chunks import (
    CHUNK_BYTES,
    Linear,
    check_operands,
    drop_absent,
    fake_gradients,
    fill_absent,
    in_chunks,
    product_dtype,
    valid_rows,
)
from liger_models.kernels.losses._logit_tiles import (
    cap_logits,
    check_softcap,
    check_temperature,
    fit_tile,
    fold_temperature,
    load_columns,
    row_lse2,
    scaled_logits,
)
from liger_models.kernels.losses._reductions import check_label_dtype


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Each label's log-probability and its distribution's entropy, both [...], in nats, in float32
    (float64 for float64 inputs), and zero where the label is `ignore_index`. Both have gradients for x,
    weight and bias.

    x [..., H]; weight [V, H] and bias [V] of x's dtype, or of any under autocast, whose dtype the products
    then take; labels [...], int64 or int32, in [0, V) or equal to `ignore_index`. The temperature divides
    the logits last, after the scale and the cap. num_valid and chunk_bytes are those of
    `linear_cross_entropy`.

    Raises ValueError or TypeError for shapes, dtypes and options that do not fit, IndexError for a label
    outside the vocabulary. If num_valid vouches for labels on a GPU, one outside gives nan instead.
    """
    check_temperature(temperature)
    check_softcap(softcap)
    check_operands(x, weight, labels, bias)
    check_label_dtype(labels)
    scale, cap = fold_temperature(logit_scale, softcap, temperature)
    plan = _Plan(ignore_index, cap, scale, product_dtype(x, weight, bias), chunk_bytes, num_valid)
    rows = x.reshape(-1, x.shape[-1])
    log_probs, entropy = _LogProbs.apply(rows, weight, bias, labels.reshape(-1), plan)
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def linear_log_probs_plain(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The plain twin of `linear_log_probs`: all logits at once, in PyTorch's own operations."""
    z = at_least_float32(torch.nn.functional.linear(x, weight, bias)) * logit_scale  # [..., V]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    p = log_p.exp()
    valid = labels != ignore_index
    log_probs = log_p.gather(-1, labels.where(valid, 0).long().unsqueeze(-1)).squeeze(-1)
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    return log_probs.where(valid, 0.0), entropy.where(valid, 0.0)


class _Plan(NamedTuple):
    ignore_index: int
    softcap: float | None
    logit_scale: float
    dtype: torch.dtype  # of the products
    chunk_bytes: int
    num_valid: int | None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, plan):
        log_probs, entropy, lse = _forward(x, weight, bias, labels, plan)
        ctx.save_for_backward(x, weight, bias, labels, lse, entropy)
        ctx.plan = plan
        return log_probs.clone(), entropy.clone()  # which a caller may alter in place

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        grad_log_probs, grad_entropy = grad_log_probs.contiguous(), grad_entropy.contiguous()
        wanted = ctx.needs_input_grad[:3]
        x, weight, bias, labels, lse, entropy = ctx.saved_tensors
        grads = _backward(
            x, weight, bias, labels, lse, entropy, grad_log_probs, grad_entropy, plan=ctx.plan, wanted=wanted
        )
        return *grads, None, None


def _forward(x, weight, bias, labels, plan):
    """Log-probability, entropy and log-sum-exp of each row, [T] each."""
    if torch.compiler.is_compiling():
        return _forward_op(x, weight, bias, labels, *plan)
    index = valid_rows(labels, len(weight), plan.ignore_index, plan.num_valid)
    results = at_least_float32(x.new_empty(0, dtype=plan.dtype)).new_zeros(3, len(x))

    def step(chunk, logits):
        results[:, chunk] = row_log_probs(logits, labels[chunk], plan)

    in_chunks(Linear(x, weight, bias, plan.dtype), index, step, chunk_bytes=plan.chunk_bytes)
    return list(results.unbind())


def _backward(x, weight, bias, labels, lse, entropy, grad_log_probs, grad_entropy, *, plan, wanted):
    """dx, dw, dbias, where wanted."""
    if torch.compiler.is_compiling():
        grads = _backward_op(
            x, weight, bias, labels, lse, entropy, grad_log_probs, grad_entropy, *plan, *wanted
        )
        return drop_absent(grads, wanted)
    index = valid_rows(labels, len(weight), plan.ignore_index, plan.num_valid)

    def step(chunk, logits):
        row_values = (t[chunk] for t in (labels, lse, entropy, grad_log_probs, grad_entropy))
        write_log_probs_gradient(logits, *row_values, plan=plan)

    linear = Linear(x, weight, bias, plan.dtype)
    return in_chunks(linear, index, step, chunk_bytes=plan.chunk_bytes, wanted=wanted)


@torch.library.custom_op("liger_models::linear_log_probs", mutates_args=())
def _forward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
) -> list[Tensor]:
    """`_forward` as one operation of a compiled graph."""
    plan = _Plan(ignore_index, softcap, logit_scale, dtype, chunk_bytes, num_valid)
    return [result.clone() for result in _forward(x, weight, bias, labels, plan)]


@_forward_op.register_fake
def _(x, weight, bias, labels, ignore_index, softcap, logit_scale, dtype, *_):
    return [x.new_empty(len(x), dtype=torch.promote_types(dtype, torch.float32)) for _ in range(3)]


@torch.library.custom_op("liger_models::linear_log_probs_backward", mutates_args=())
def _backward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
) -> list[Tensor]:
    """`_backward` as one operation of a compiled graph; a gradient that is not wanted is an empty tensor."""
    plan = _Plan(ignore_index, softcap, logit_scale, dtype, chunk_bytes, num_valid)
    wanted = (want_dx, want_dw, want_db)
    grads = _backward(
        x, weight, bias, labels, lse, entropy, grad_log_probs, grad_entropy, plan=plan, wanted=wanted
    )
    return fill_absent(grads, x)


@_backward_op.register_fake
def _(x, weight, bias, *rest):
    return fake_gradients((x, weight, bias), wanted=rest[-3:], dtype=x.dtype)


def row_log_probs(logits: Tensor, labels: Tensor, plan: _Plan) -> Tensor:
    """Log-probability, entropy and log-sum-exp of each row, [3, N]. A label outside the vocabulary gives nan.

    logits [N, V] with an inner stride of one; labels [N].
    """
    if use_triton(logits, labels):
        results = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        lanes, depth = fit_tile(logits.shape[1], _FORWARD_TILE)
        with on_device_of(logits):
            _forward_kernel[(len(logits),)](
                *_common(logits, labels, plan),
                results,
                len(logits),
                HAS_SOFTCAP=plan.softcap is not None,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),
            )
        return results
    z, _ = cap_logits(logits, plan.logit_scale, plan.softcap)
    lse = torch.logsumexp(z, 1)
    log_p = z - lse.unsqueeze(1)
    p = log_p.exp()
    inside = (labels >= 0) & (labels < z.shape[1])
    log_probs = log_p.gather(1, labels.where(inside, 0).long().unsqueeze(1)).squeeze(1)
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
    results = torch.stack([log_probs.where(inside, float("nan")), entropy, lse])
    return results.masked_fill(labels == plan.ignore_index, 0.0)


def write_log_probs_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    *,
    plan: _Plan,
) -> None:
    """Put the gradient of grad_log_probs * log_prob + grad_entropy * entropy over the logits [N, V]."""
    if use_triton(logits, labels):
        vocab = logits.shape[1]
        block = min(next_power_of_2(vocab), _BACKWARD_BLOCK)
        blocks = ceil_div(vocab, block)
        with on_device_of(logits):
            _backward_kernel[(len(logits) * blocks,)](
                *_common(logits, labels, plan),
                lse,
                entropy,
                grad_log_probs,
                grad_entropy,
                blocks,
                HAS_SOFTCAP=plan.softcap is not None,
                BLOCK=block,
                num_warps=max(1, block // 512),
            )
        return
    z, slope = cap_logits(logits, plan.logit_scale, plan.softcap)
    log_p = z - lse.unsqueeze(1)
    p = log_p.exp()
    surprise = (log_p + entropy.unsqueeze(1)).masked_fill(p == 0, 0.0)
    grad = -p * (grad_log_probs.unsqueeze(1) + grad_entropy.unsqueeze(1) * surprise)
    inside = (labels >= 0) & (labels < z.shape[1])
    row = torch.arange(len(z), device=z.device)
    grad[row, labels.where(inside, 0).long()] += grad_log_probs
    logits.copy_((grad * slope).masked_fill((labels == plan.ignore_index).unsqueeze(1), 0.0))


def _common(logits, labels, plan):
    """The arguments that both kernels begin with."""
    cap = 1.0 if plan.softcap is None else plan.softcap
    return (
        logits,
        labels.contiguous(),
        logits.stride(0),
        logits.shape[1],
        plan.ignore_index,
        plan.logit_scale,
        cap,
    )


# Chosen by reasoning, and not measured: with 32 warps to a row few rows are in flight, and the L2 cache holds
# them for the second reading.
_FORWARD_TILE = 8192, 2  # lanes, depth
_BACKWARD_BLOCK = 4096


@jit
def _forward_kernel(
    logits_ptr,
    labels_ptr,
    logits_stride,
    vocab,
    ignore_index,
    logit_scale,
    softcap,
    results_ptr,
    rows,
    HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program a row.  results [3, rows], zero before"""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        return
    # A label outside the vocabulary must not read beyond the row.
    inside = (label >= 0) & (label < vocab)
    label_logit, _label_slope = scaled_logits(
        tl.load(row_ptr + tl.where(inside, label, 0)).to(tl.float32), logit_scale, softcap, HAS_SOFTCAP
    )
    lse2 = row_lse2(row_ptr, vocab, logit_scale, softcap, HAS_SOFTCAP, LANES, DEPTH)
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    surprises = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, DEPTH * LANES):
        columns = start + tile
        z, _ = scaled_logits(load_columns(row_ptr, columns, vocab, True), logit_scale, softcap, HAS_SOFTCAP)
        log_p = tl.where(columns < vocab, z - lse2, -float("inf"))
        p = tl.exp2(log_p)
        surprises += tl.sum(tl.where(p == 0.0, 0.0, p * log_p), 0)
    log_prob = tl.where(inside, (label_logit - lse2) * 0.6931471805599453, float("nan"))
    tl.store(results_ptr + row, log_prob)
    tl.store(results_ptr + rows + row, -tl.sum(surprises, 0) * 0.6931471805599453)
    tl.store(results_ptr + 2 * rows + row, lse2 * 0.6931471805599453)


@jit
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    logits_stride,
    vocab,
    ignore_index,
    logit_scale,
    softcap,
    lse_ptr,
    entropy_ptr,
    grad_log_probs_ptr,
    grad_entropy_ptr,
    blocks,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row, of `blocks`; the row's values are contiguous."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(row_ptr + columns, tl.zeros([BLOCK], row_ptr.dtype.element_ty), mask=columns < vocab)
        return
    z, slope = scaled_logits(load_columns(row_ptr, columns, vocab, True), logit_scale, softcap, HAS_SOFTCAP)
    log_p = z * 0.6931471805599453 - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    grad_log_prob = tl.load(grad_log_probs_ptr + row)
    surprise = tl.where(p == 0.0, 0.0, log_p + tl.load(entropy_ptr + row))
    grad = -p * (grad_log_prob + tl.load(grad_entropy_ptr + row) * surprise)
    grad = tl.where(columns == label, grad + grad_log_prob, grad) * logit_scale
    if HAS_SOFTCAP:
        grad *= slope
    tl.store(row_ptr + columns, grad.to(row_ptr.dtype.element_ty), mask=columns < vocab)
