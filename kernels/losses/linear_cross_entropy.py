"""Cross entropy of a linear layer's output, `x @ weight.T + bias`, without materialising all logits.

Loss and gradient of a row of logits are as in `cross_entropy`. Tokens are processed in chunks:

    logits = x W^T + b,  losses, dlogits written over the logits,  dx = dlogits W,  dW += dlogits^T x

The forward pass computes the gradients for an upstream gradient of one, and the backward pass only multiplies
by the true one. That takes the three matrix products of any backward pass, each once. Tokens without a label
are left out of the products. Additional memory: a chunk of logits, and the float32 sum of dW if there is more
than one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import once_differentiable
from liger_models.kernels.losses._cross_entropy_kernels import LossOptions
from liger_models.kernels.losses._linear_chunks import (
    CHUNK_BYTES,
    Linear,
    check_operands,
    drop_absent,
    fake_gradients,
    fill_absent,
    gradients_wanted,
    in_chunks,
    part_of,
    product_dtype,
    reduced_forward,
    release_gradients,
    valid_rows,
)
from liger_models.kernels.losses._reductions import (
    check_reduction,
    check_weights,
    loss_denominator,
    reduce_losses,
)
from liger_models.kernels.losses.cross_entropy import (
    CrossEntropyOutput,
    Extras,
    add_extras,
    cross_entropy,
    loss_options,
    row_losses,
)


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
    temperature: float = 1.0,
    class_weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor | CrossEntropyOutput:
    """cross_entropy(x @ weight.T + bias, labels), in float32 (float64 for float64 inputs).

    x [..., H]; weight [V, H] and bias [V] of x's dtype, or of any dtype under autocast, which then determines
    the products' dtype; labels [...], int64 or int32, in [0, V) or equal to `ignore_index`. class_weight [V]
    and token_weights [...] have no gradient. Reductions, options and additional results as in
    `cross_entropy`: the mean over no valid token is nan.

    Gradients are computed for those of x, weight and bias that require them, in the forward pass; with
    reduction "none", and for the gradient of a returned z-loss, in the backward pass, which recomputes the
    logits. Sums over tokens are in float32 and rounded once.

    num_valid is the count of labels that differ from `ignore_index`. Passing it, which asserts that all
    labels are in the vocabulary, avoids synchronising a GPU; a label outside then makes the loss nan.
    Otherwise labels are counted and checked: IndexError. Under CUDA graph capture without num_valid, labels
    are not checked, and ignored tokens stay in the products.

    chunk_bytes is the additional memory to use; a chunk has at least 1,024 tokens regardless.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options.
    """
    options = loss_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_reduction(reduction, num_items)
    check_operands(x, weight, labels, bias)
    check_weights(labels, len(weight), class_weight, token_weights)
    shape, labels, x = labels.shape, labels.reshape(-1), x.reshape(-1, x.shape[-1])
    dtype = product_dtype(x, weight, bias)
    extras = Extras(return_z_loss, return_token_accuracy, return_predicted_tokens)
    plan = _Plan(options, dtype, chunk_bytes, num_valid, extras.z_loss, extras.need_predictions)

    accumulate = torch.promote_types(x.dtype, torch.float32)
    if token_weights is not None:
        token_weights = token_weights.detach().reshape(-1).to(accumulate)
    divisor = None
    if reduction == "mean":
        if num_items is None and class_weight is None and token_weights is None:
            num_items = num_valid
        divisor = loss_denominator(labels, ignore_index, class_weight, token_weights, num_items, accumulate)

    def reduced(losses: Tensor) -> Tensor:
        return reduce_losses(losses, reduction, token_weights, divisor)

    if reduction == "none":
        losses, lse, predicted = _TokenLosses.apply(x, weight, bias, labels, class_weight, plan)
        loss = reduced(losses)
    else:
        inverse = torch.ones((), dtype=accumulate, device=x.device)
        if divisor is not None:
            inverse = divisor.reciprocal()
        wanted = gradients_wanted(x, weight, bias)
        loss, lse, predicted = _ReducedLoss.apply(
            x, weight, bias, labels, class_weight, token_weights, inverse, plan, wanted
        )
    if extras.z_loss:
        lse = _LogSumExps.apply(x, weight, bias, labels, lse, plan)
    labels = labels.view(shape)
    return add_extras(loss, extras, lse, predicted, labels, class_weight, options, reduction, reduced)


def linear_cross_entropy_plain(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    **options,
) -> Tensor | CrossEntropyOutput:
    """Plain twin of `linear_cross_entropy`, with the options of `cross_entropy`: all logits at once."""
    logits = torch.nn.functional.linear(x, weight, bias)
    return cross_entropy(logits.movedim(-1, 1), labels, weight=class_weight, **options)


class _Plan(NamedTuple):
    options: LossOptions
    dtype: torch.dtype  # of the products
    chunk_bytes: int
    num_valid: int | None
    keep_lse: bool
    predict: bool


class _ReducedLoss(torch.autograd.Function):
    """Sum of all rows' losses times `inverse`, with its gradients stored in ctx; and the rows' log-sum-exps
    and predicted tokens, or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, token_weights, inverse, plan, wanted):
        operands = x, weight, bias

        def chunked(grad_scale, round_dw):
            return _chunked(*operands, labels, class_weight, grad_scale, plan, wanted, round_dw)

        loss, others = reduced_forward(ctx, operands, wanted, plan.dtype, inverse, token_weights, chunked)
        ctx.mark_non_differentiable(*(other for other in others if other is not None))
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return *release_gradients(ctx, upstream), *(None,) * 6


class _TokenLosses(torch.autograd.Function):
    """Loss of each row. The rows' upstream gradients enter every sum, so backward recomputes the logits."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weight, plan):
        ctx.save_for_backward(x, weight, bias, labels, class_weight)
        ctx.plan = plan
        results = _chunked(x, weight, bias, labels, class_weight, None, plan, (False,) * 3)[:3]
        ctx.mark_non_differentiable(*(result for result in results[1:] if result is not None))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        plan = ctx.plan._replace(keep_lse=False, predict=False)
        wanted = ctx.needs_input_grad[:3]
        x, weight, bias, labels, class_weight = ctx.saved_tensors
        results = _chunked(x, weight, bias, labels, class_weight, upstream.contiguous(), plan, wanted)
        return *results[3:], None, None, None


class _LogSumExps(torch.autograd.Function):
    """Pass through each row's known log-sum-exp; only backward computes."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, lse, plan):
        ctx.save_for_backward(x, weight, bias, labels)
        ctx.plan = plan
        return lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_lse):
        options = ctx.plan.options._replace(label_smoothing=0.0, z_loss=0.0)
        plan = ctx.plan._replace(options=options, keep_lse=False, predict=False)
        no_loss = grad_lse.new_zeros(1)
        wanted = ctx.needs_input_grad[:3]
        x, weight, bias, labels = ctx.saved_tensors
        results = _chunked(
            x, weight, bias, labels, None, no_loss, plan, wanted, grad_lse=grad_lse.contiguous()
        )
        return *results[3:], None, None, None


def _chunked(
    x, weight, bias, labels, class_weight, grad_scale, plan, wanted, round_dw=True, grad_lse=None
) -> list[Tensor | None]:
    """Loss, log-sum-exp and predicted token [T] of each row; and, where wanted, the gradients of grad_scale
    ([1] or [T]) times the loss plus grad_lse [T] times the log-sum-exp.

    dW and dbias have their operands' dtypes, or float32 if not round_dw.
    """
    if torch.compiler.is_compiling():
        vectors = labels, class_weight, grad_scale, grad_lse
        results = _chunked_op(x, weight, bias, *vectors, *plan.options, *plan[1:], *wanted, round_dw)
        return drop_absent(results, (True, plan.keep_lse, plan.predict, *wanted))
    options = plan.options
    index = valid_rows(labels, len(weight), options.ignore_index, plan.num_valid)
    losses = torch.zeros(len(x), dtype=torch.promote_types(plan.dtype, torch.float32), device=x.device)
    lse = torch.zeros_like(losses) if plan.keep_lse else None
    predicted = torch.full_like(losses, -1, dtype=torch.int64) if plan.predict else None

    def step(chunk, logits):
        scale = part_of(grad_scale, chunk) if any(wanted) else None
        row_loss, row_lse, row_predicted = row_losses(
            logits,
            labels[chunk],
            class_weight,
            options,
            scale,
            grad_lse=part_of(grad_lse, chunk),
            predict=plan.predict,
        )
        losses[chunk] = row_loss
        if lse is not None:
            lse[chunk] = row_lse
        if predicted is not None and row_predicted is not None:
            predicted[chunk] = row_predicted

    grads = in_chunks(
        Linear(x, weight, bias, plan.dtype),
        index,
        step,
        chunk_bytes=plan.chunk_bytes,
        wanted=wanted,
        round_dw=round_dw,
    )
    return [losses, lse, predicted, *grads]


@torch.library.custom_op("liger_models::linear_cross_entropy", mutates_args=())
def _chunked_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    grad_scale: Tensor | None,
    grad_lse: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    keep_lse: bool,
    predict: bool,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
    round_dw: bool,
) -> list[Tensor]:
    """`_chunked` as a single operation of a compiled graph; unwanted results are empty tensors."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    plan = _Plan(options, dtype, chunk_bytes, num_valid, keep_lse, predict)
    wanted = want_dx, want_dw, want_db
    results = _chunked(
        x, weight, bias, labels, class_weight, grad_scale, plan, wanted, round_dw, grad_lse=grad_lse
    )
    return fill_absent(results, x)


@_chunked_op.register_fake
def _(x, weight, bias, labels, class_weight, grad_scale, grad_lse, *rest):
    dtype, (keep_lse, predict, *wanted, round_dw) = rest[5], rest[-6:]
    losses = x.new_empty(len(x), dtype=torch.promote_types(dtype, torch.float32))
    lse = torch.empty_like(losses) if keep_lse else None
    predicted = torch.empty_like(losses, dtype=torch.int64) if predict else None
    grads = fake_gradients((x, weight, bias), wanted, dtype, round_dw)
    return [*fill_absent((losses, lse, predicted), x), *grads]
