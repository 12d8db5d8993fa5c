"""Cross entropy over a vocabulary, with the options that language models use.

For a row of logits a, let z = softcap * tanh(logit_scale * a / softcap), lse = log(sum_c exp(z_c)), y the
label, V the vocabulary size, w the class weights (ones if not given) and s the label smoothing:

    loss       = (1 - s) w_y (lse - z_y) + s/V sum_c w_c (lse - z_c) + z_loss w_y lse^2
    dloss/dz_c = f softmax(z)_c - (1 - s) w_y [c = y] - s/V w_c
             f = (1 - s) w_y + s/V sum_c w_c + 2 z_loss w_y lse

Rows whose label is `ignore_index` have no loss and no gradient. The fewest bytes that must move are three
passes over the logits: the forward reads them, the backward reads them and writes their gradient.
`linear_cross_entropy` owns its logits: there `row_losses` puts the gradient over them in the same launch.

Label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7. z-loss: Chowdhery
et al., "PaLM" (2022), section 5. Soft cap: Gemma Team, "Gemma 2" (2024), section 2. One-pass log-sum-exp:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    as_rows,
    at_least_float32,
    jit,
    on_device_of,
    tl,
    triton,
    use_triton,
)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_items: int | Tensor | None = None,
    return_z_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of logits, in float32 (float64 for float64 logits). The logits are not altered.

    logits [N, C] or [N, C, d...], any floating dtype; labels [N] or [N, d...], int64 or int32, in [0, C) or
    equal to `ignore_index`. weight [C] weighs classes, token_weights (of the labels' shape) weigh tokens;
    both are constants to autograd. reduction "none" gives losses of the labels' shape, "sum" their sum.
    "mean" divides it by `num_items` (a number, or a tensor of one) if given, else by the sum over valid
    tokens of class weight times token weight, which is their count if neither is given. The mean over no
    valid token is nan, as in torch. With return_z_loss a second result is the z-loss's share of the first,
    reduced alike and differentiable.

    Raises ValueError or TypeError for shapes, dtypes and options that do not fit, IndexError for a label
    outside the vocabulary. On a GPU such a label ends the program by a device-side assertion, as in torch.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    _check(options, reduction, num_items, logits, labels, weight, token_weights)
    if not use_triton(logits, labels, weight, token_weights):
        return cross_entropy_plain(
            logits,
            labels,
            **options._asdict(),
            reduction=reduction,
            weight=weight,
            token_weights=token_weights,
            num_items=num_items,
            return_z_loss=return_z_loss,
        )
    losses, lse = _CrossEntropy.apply(_as_matrix(logits), labels.reshape(-1), weight, options)
    return _reduce(losses, lse, labels, options, reduction, weight, token_weights, num_items, return_z_loss)


def cross_entropy_plain(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_items: int | Tensor | None = None,
    return_z_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The plain twin of `cross_entropy`: the meaning of every option, in PyTorch's own operations."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    z = at_least_float32(_as_matrix(logits)) * logit_scale  # [N, C]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    flat = labels.reshape(-1)
    valid = flat != ignore_index
    lse = torch.logsumexp(z, dim=1).where(valid, 0.0)
    label_logit = z.gather(1, flat.where(valid, 0).long().unsqueeze(1)).squeeze(1)
    w_label = label_weights(flat, ignore_index, weight, z.dtype)  # [N], zero where ignored
    losses = (1 - label_smoothing) * w_label * (lse - label_logit)
    if z_loss:
        losses = losses + z_loss * w_label * lse.square()
    if label_smoothing:
        w = torch.ones_like(z[:1]) if weight is None else weight.detach().to(z.dtype).unsqueeze(0)
        losses = losses + label_smoothing / z.shape[1] * (w * (lse.unsqueeze(1) - z)).sum(1)
    losses = losses.where(valid, 0.0)
    return _reduce(losses, lse, labels, options, reduction, weight, token_weights, num_items, return_z_loss)


class LossOptions(NamedTuple):
    """What a row's loss depends on beside its logits, its label and the class weights."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float


def label_weights(
    labels: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The class weight of each label, zero where it is ignored.  labels [N] -> [N]"""
    valid = labels != ignore_index
    if weight is None:
        return valid.to(dtype)
    return weight.detach().to(dtype)[labels.where(valid, 0)] * valid


def loss_denominator(
    labels: Tensor,
    ignore_index: int,
    weight: Tensor | None,
    token_weights: Tensor | None,
    num_items: int | Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What reduction="mean" divides by, as a tensor without dimensions on the labels' device.  labels [N]"""
    if num_items is not None:
        if isinstance(num_items, Tensor):
            return num_items.detach().to(labels.device, dtype).reshape(())
        return torch.full((), num_items, dtype=dtype, device=labels.device)
    if token_weights is None and weight is None:
        return (labels != ignore_index).sum().to(dtype)
    w = label_weights(labels, ignore_index, weight, dtype)
    return (w if token_weights is None else w * token_weights.detach().reshape(-1).to(dtype)).sum()


def _reduce(losses, lse, labels, options, reduction, weight, token_weights, num_items, return_z_loss):
    flat = labels.reshape(-1)
    ignore_index = options.ignore_index
    divisor = None
    if reduction == "mean":
        divisor = loss_denominator(flat, ignore_index, weight, token_weights, num_items, losses.dtype)

    def reduced(losses: Tensor) -> Tensor:
        if token_weights is not None:
            losses = losses * token_weights.detach().reshape(-1).to(losses.dtype)
        if reduction == "none":
            return losses.view(labels.shape)
        return losses.sum() if divisor is None else losses.sum() / divisor

    if not return_z_loss:
        return reduced(losses)
    w_label = label_weights(flat, ignore_index, weight, losses.dtype)
    return reduced(losses), reduced(options.z_loss * w_label * lse.square())


def _as_matrix(logits: Tensor) -> Tensor:
    """[N, C, d...] as [N d..., C], in the order in which labels [N, d...] lie."""
    return as_rows(logits if logits.dim() == 2 else logits.movedim(1, -1))


def _check(options, reduction, num_items, logits, labels, weight, token_weights) -> None:
    check_options(options, reduction, num_items)
    if logits.dim() < 2 or labels.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"found logits {list(logits.shape)} and labels {list(labels.shape)}; expected [N, C] and [N], or "
            "[N, C, d...] and [N, d...]: flatten logits [batch, seq, C] to [batch * seq, C]"
        )
    check_weights(labels, logits.shape[1], weight, token_weights)
    check_labels(labels, logits.shape[1], options.ignore_index)


def check_options(options: LossOptions, reduction: str, num_items: int | Tensor | None) -> None:
    """Raise ValueError for an option that has no meaning."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")
    if num_items is not None and reduction != "mean":
        raise ValueError(f"num_items divides only reduction='mean'; drop it for reduction={reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items has shape {list(num_items.shape)}; expected one number")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {options.label_smoothing}; expected a number from 0 to 1")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap is {options.softcap}; expected a positive number, or None for no cap")


def check_weights(
    labels: Tensor, vocab_size: int, class_weight: Tensor | None, token_weights: Tensor | None
) -> None:
    """Raise TypeError or ValueError for labels, class weights or token weights that do not fit each other."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}; expected int64 or int32")
    if class_weight is not None and class_weight.shape != (vocab_size,):
        raise ValueError(f"class weights have shape {list(class_weight.shape)}; expected [{vocab_size}]")
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights have shape {list(token_weights.shape)}; expected {list(labels.shape)}, as labels"
        )


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise IndexError for a label outside the vocabulary, where labels can be read without waiting.

    On a GPU the kernel asserts as much, and in compiled code the plain twin's gather does.
    """
    if labels.is_cuda or torch.compiler.is_compiling():
        return
    outside = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    if outside.any():
        raise_label_error(labels, outside, vocab_size, ignore_index)


def raise_label_error(labels: Tensor, outside: Tensor, vocab_size: int, ignore_index: int) -> None:
    """IndexError about the first label that `outside`, of the labels' shape, marks."""
    place = outside.nonzero()[0].tolist()
    label, position = int(labels[tuple(place)]), place[0] if len(place) == 1 else place
    raise IndexError(
        f"label {label} at position {position} lies outside the vocabulary of {vocab_size}; "
        f"expected 0 to {vocab_size - 1}, or {ignore_index} for a token without a label"
    )


def row_losses(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    grad_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss and log-sum-exp; given `grad_scale`, it times the gradient is written over the logits.

    logits [N, C] with an inner stride of one; labels [N]; grad_scale [N] or [1], float32 (float64 for float64
    logits). Returns two [N]. Not differentiable, and no check: a label outside the vocabulary gives nan.
    """
    if use_triton(logits, labels, class_weight):
        return _launch_forward(logits, labels, class_weight, options, grad_scale)
    z = at_least_float32(logits)
    if options.logit_scale != 1.0:
        z = z * options.logit_scale
    tanh = None
    if options.softcap is not None:
        tanh = (z / options.softcap).tanh_()
        z = options.softcap * tanh
    vocab = z.shape[1]
    valid = labels != options.ignore_index
    inside = (labels >= 0) & (labels < vocab)
    index = labels.where(inside, 0).long()
    row = torch.arange(len(z), device=z.device)
    w_label = 1.0 if class_weight is None else class_weight.to(z.dtype)[index]
    smoothing = options.label_smoothing
    lse = torch.logsumexp(z, dim=1)
    losses = (1 - smoothing) * w_label * (lse - z[row, index])
    if options.z_loss:
        losses += options.z_loss * w_label * lse.square()
    factor = w_label * (1 - smoothing + 2 * options.z_loss * lse)  # of the softmax, in the gradient
    if smoothing:
        w = z.new_ones(vocab) if class_weight is None else class_weight.to(z.dtype)
        losses += smoothing / vocab * (w.sum() * lse - (z * w).sum(1))  # z @ w would fall under autocast
        factor += smoothing / vocab * w.sum()
    losses = losses.where(inside, float("nan")).where(valid, 0.0)
    if grad_scale is not None:
        outer = grad_scale * options.logit_scale
        grad = torch.sub(z, lse.unsqueeze(1), out=z).exp_().mul_((factor * outer).unsqueeze(1))
        if smoothing:
            grad -= smoothing / vocab * outer.expand(len(z)).unsqueeze(1) * w
        grad[row, index] -= (1 - smoothing) * w_label * outer
        if tanh is not None:
            grad *= 1 - tanh.square()
        logits.copy_(grad.masked_fill_(~valid.unsqueeze(1), 0.0))
    return losses, lse.where(valid, 0.0)


class _CrossEntropy(torch.autograd.Function):
    """Row losses and log-sum-exps, both differentiable, each from one read of the logits."""

    @staticmethod
    def forward(ctx, logits, labels, class_weight, options):
        labels_ok = None
        if logits.is_cuda:
            labels_ok = torch.ones((), dtype=torch.int32, device=logits.device)
        losses, lse = _launch_forward(logits, labels, class_weight, options, labels_ok=labels_ok)
        if labels_ok is not None:
            torch._assert_async(labels_ok, f"a label lies outside the vocabulary of {logits.shape[1]}")
        ctx.save_for_backward(logits, labels, class_weight, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_losses, grad_lse):
        logits, labels, class_weight, lse = ctx.saved_tensors
        if grad_losses is None:
            grad_losses = torch.zeros_like(lse[:1])
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _launch_backward(grad, logits, labels, class_weight, ctx.options, lse, grad_losses, grad_lse)
        return grad, None, None, None


def _launch_forward(logits, labels, class_weight, options, grad_scale=None, labels_ok=None):
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    if rows:
        lanes, depth = _LOSS_TILE if grad_scale is None else _GRADIENT_TILE
        lanes = min(triton.next_power_of_2(vocab), lanes)
        depth = min(triton.next_power_of_2(triton.cdiv(vocab, lanes)), depth)
        arguments, flags = _common(logits, labels, class_weight, options)
        with on_device_of(logits):
            _forward_kernel[(rows,)](
                *arguments,
                losses,
                lse,
                labels_ok,
                grad_scale,
                _stride(grad_scale),
                **flags,
                LANES=lanes,
                DEPTH=depth,
                num_warps=max(1, lanes // 256),  # a thread loads 16 bytes of half precision at a time
            )
    return losses, lse


def _launch_backward(grad, logits, labels, class_weight, options, lse, grad_losses, grad_lse):
    rows, vocab = logits.shape
    if rows:
        block = min(triton.next_power_of_2(vocab), _BACKWARD_BLOCK)
        blocks = triton.cdiv(vocab, block)
        arguments, flags = _common(logits, labels, class_weight, options)
        with on_device_of(logits):
            _backward_kernel[(rows * blocks,)](
                *arguments,
                grad,
                lse,
                grad_losses,
                grad_lse,
                _stride(grad_losses),
                _stride(grad_lse),
                blocks,
                **flags,
                BLOCK=block,
                num_warps=max(1, block // 512),
            )


def _common(logits, labels, class_weight, options):
    """The arguments that both kernels begin with, and the flags they are compiled for."""
    smoothing = float(options.label_smoothing)
    weight_sum = class_weight.sum(dtype=torch.float32) if class_weight is not None and smoothing else None
    arguments = (
        logits,
        labels,
        None if class_weight is None else class_weight.contiguous(),
        weight_sum,
        logits.stride(0),
        labels.stride(0),
        logits.shape[1],
        options.ignore_index,
        smoothing,
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if options.softcap is None else float(options.softcap),
    )
    return arguments, {"HAS_SOFTCAP": options.softcap is not None, "HAS_SMOOTHING": smoothing != 0.0}


def _stride(x: Tensor | None) -> int:
    """A vector's stride, zero for one value that stands for all rows."""
    return 0 if x is None or len(x) == 1 else x.stride(0)


# Chosen on an H200 at a vocabulary of 128,256 in bfloat16. The first tile reads logits at 98% of a copy's
# bandwidth. The second, with 32 warps, keeps so few rows in flight that the L2 cache holds them: writing the
# gradient over them takes 6% less than three passes would. The backward kernel goes at 95%.
_LOSS_TILE = 1024, 8  # lanes, depth
_GRADIENT_TILE = 8192, 4
_BACKWARD_BLOCK = 4096


@jit
def _load(pointer, columns, vocab, MASKED):
    """float32 values of the columns; only the last tile of a row needs the comparisons that a mask costs."""
    if MASKED:
        values = tl.load(pointer + columns, mask=columns < vocab, other=0.0)
    else:
        values = tl.load(pointer + columns)
    return values.to(tl.float32)


@jit
def _scaled_logits(a, logit_scale, softcap, HAS_SOFTCAP):
    """z log2(e), so that exp2 gives exp(z) without another product; and the slope dz/da of the cap alone."""
    slope = 1.0
    if HAS_SOFTCAP:
        # From exp(-2|x|), which neither overflows nor loses the slope where tanh is close to one.
        x = a * (logit_scale / softcap)
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        z = softcap * 1.4426950408889634 * tl.where(x < 0, -t, t)
        slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
    else:
        z = a * (logit_scale * 1.4426950408889634)
    return z, slope


@jit
def _label_weight(class_weight_ptr, label):
    weight = 1.0
    if class_weight_ptr is not None:
        weight = tl.load(class_weight_ptr + label).to(tl.float32)
    return weight


@jit
def _total_weight(class_weight_sum_ptr, vocab):
    return vocab * 1.0 if class_weight_sum_ptr is None else tl.load(class_weight_sum_ptr)


@jit
def _accumulate(
    maximum,
    normalizer,
    weighted_sum,
    row_ptr,
    columns,
    class_weight_ptr,
    vocab,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
    MASKED,
):
    """Take the logits of columns [DEPTH, LANES] into each lane's maximum, sum of exp2 and sum of w_c z_c."""
    z, _ = _scaled_logits(_load(row_ptr, columns, vocab, MASKED), logit_scale, softcap, HAS_SOFTCAP)
    if HAS_SMOOTHING:
        term = z
        if class_weight_ptr is not None:
            term *= _load(class_weight_ptr, columns, vocab, MASKED)
        if MASKED:
            term = tl.where(columns < vocab, term, 0.0)
        weighted_sum += tl.sum(term, 0)
    if MASKED:
        z = tl.where(columns < vocab, z, -float("inf"))
    larger = tl.maximum(maximum, tl.max(z, 0))
    # While every logit so far is -inf, subtract zero: exp2(-inf - -inf) would be nan.
    shift = tl.where(larger == -float("inf"), 0.0, larger)
    normalizer = normalizer * tl.exp2(maximum - shift) + tl.sum(tl.exp2(z - shift[None, :]), 0)
    return larger, normalizer, weighted_sum


@jit
def _write_gradient(
    grad_ptr,
    row_ptr,
    columns,
    class_weight_ptr,
    class_weight_sum_ptr,
    label,
    label_weight,
    lse,
    grad_loss,
    grad_lse,
    vocab,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    HAS_SOFTCAP,
    HAS_SMOOTHING,
):
    """The gradient of grad_loss * loss + grad_lse * lse for some columns of a row; in place if asked."""
    z, slope = _scaled_logits(_load(row_ptr, columns, vocab, True), logit_scale, softcap, HAS_SOFTCAP)
    grad_loss *= logit_scale
    factor = grad_loss * label_weight * (1.0 - smoothing + 2.0 * z_loss * lse) + grad_lse * logit_scale
    if HAS_SMOOTHING:
        spread = grad_loss * smoothing / vocab
        factor += spread * _total_weight(class_weight_sum_ptr, vocab)
    grad = factor * tl.exp2(z - lse * 1.4426950408889634)
    if HAS_SMOOTHING:
        if class_weight_ptr is not None:
            spread *= _load(class_weight_ptr, columns, vocab, True)
        grad -= spread
    grad = tl.where(columns == label, grad - grad_loss * label_weight * (1.0 - smoothing), grad)
    if HAS_SOFTCAP:
        grad *= slope
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + columns, grad, mask=columns < vocab)


@jit
def _forward_kernel(
    logits_ptr,
    labels_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    labels_stride,
    vocab,
    ignore_index,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    losses_ptr,
    lse_ptr,
    labels_ok_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One program a row. Given grad_scale, the row's gradient replaces it while it is in the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row * labels_stride)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if grad_scale_ptr is not None:
            for start in range(0, vocab, LANES):
                columns = start + tl.arange(0, LANES)
                zeros = tl.zeros([LANES], row_ptr.dtype.element_ty)
                tl.store(row_ptr + columns, zeros, mask=columns < vocab)
        return
    # A label outside the vocabulary must not read beyond the row; its loss becomes nan below.
    inside = (label >= 0) & (label < vocab)
    label = tl.where(inside, label, 0)
    if labels_ok_ptr is not None:
        tl.store(labels_ok_ptr, 0, mask=inside == 0)
    # Read before anything may be written over it.
    label_logit, _ = _scaled_logits(
        tl.load(row_ptr + label).to(tl.float32), logit_scale, softcap, HAS_SOFTCAP
    )
    label_weight = _label_weight(class_weight_ptr, label)

    # Each lane keeps its own maximum and sum, so that no thread waits for another before the row's end. It
    # takes DEPTH logits at a time, which brings the exponentials to 1 + 1/DEPTH a logit.
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab // (DEPTH * LANES) * (DEPTH * LANES)
    maximum = tl.full([LANES], -float("inf"), tl.float32)
    normalizer = tl.zeros([LANES], tl.float32)
    weighted_sum = tl.zeros([LANES], tl.float32)  # of w_c z_c, which label smoothing needs
    for start in range(0, whole, DEPTH * LANES):
        maximum, normalizer, weighted_sum = _accumulate(
            maximum,
            normalizer,
            weighted_sum,
            row_ptr,
            start + tile,
            class_weight_ptr,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
            False,
        )
    if whole < vocab:
        maximum, normalizer, weighted_sum = _accumulate(
            maximum,
            normalizer,
            weighted_sum,
            row_ptr,
            whole + tile,
            class_weight_ptr,
            vocab,
            logit_scale,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
            True,
        )
    largest = tl.max(maximum, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    lse2 = largest + tl.log2(tl.sum(normalizer * tl.exp2(maximum - shift), 0))
    lse = lse2 * 0.6931471805599453

    loss = label_weight * (1.0 - smoothing) * (lse2 - label_logit) * 0.6931471805599453
    if z_loss != 0.0:  # else the square of a huge lse, infinity, would make it nan
        loss += label_weight * z_loss * lse * lse
    if HAS_SMOOTHING:
        total_weight = _total_weight(class_weight_sum_ptr, vocab)
        loss += smoothing / vocab * (total_weight * lse2 - tl.sum(weighted_sum, 0)) * 0.6931471805599453
    tl.store(losses_ptr + row, tl.where(inside, loss, float("nan")))
    tl.store(lse_ptr + row, lse)
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
        for start in range(0, vocab, DEPTH * LANES):
            _write_gradient(
                row_ptr,
                row_ptr,
                start + tile,
                class_weight_ptr,
                class_weight_sum_ptr,
                label,
                label_weight,
                lse,
                grad_scale,
                0.0,
                vocab,
                smoothing,
                z_loss,
                logit_scale,
                softcap,
                HAS_SOFTCAP,
                HAS_SMOOTHING,
            )


@jit
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    class_weight_ptr,
    class_weight_sum_ptr,
    logits_stride,
    labels_stride,
    vocab,
    ignore_index,
    smoothing,
    z_loss,
    logit_scale,
    softcap,
    grad_ptr,
    lse_ptr,
    grad_losses_ptr,
    grad_lse_ptr,
    grad_losses_stride,
    grad_lse_stride,
    blocks,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a block of a row, of `blocks`; grad is contiguous [N, C]."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row * labels_stride)
    grad_row_ptr = grad_ptr + row * vocab
    if label == ignore_index:
        zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + columns, zeros, mask=columns < vocab)
        return
    grad_lse = 0.0
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + row * grad_lse_stride)
    _write_gradient(
        grad_row_ptr,
        logits_ptr + row * logits_stride,
        columns,
        class_weight_ptr,
        class_weight_sum_ptr,
        label,
        _label_weight(class_weight_ptr, label),
        tl.load(lse_ptr + row),
        tl.load(grad_losses_ptr + row * grad_losses_stride),
        grad_lse,
        vocab,
        smoothing,
        z_loss,
        logit_scale,
        softcap,
        HAS_SOFTCAP,
        HAS_SMOOTHING,
    )
