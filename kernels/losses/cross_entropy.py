"""Cross entropy over a vocabulary, with the options used by language models.

For a row of logits a, let z = softcap * tanh(logit_scale * a / softcap) / temperature, lse =
log(sum_c exp(z_c)), y the label, V the vocabulary size, w the class weights (ones if not given) and s the
label smoothing:

    loss       = (1 - s) w_y (lse - z_y) + s/V sum_c w_c (lse - z_c) + z_loss w_y lse^2
    dloss/dz_c = f softmax(z)_c - (1 - s) w_y [c = y] - s/V w_c
             f = (1 - s) w_y + s/V sum_c w_c + 2 z_loss w_y lse

Rows whose label is `ignore_index` have no loss and no gradient. Minimum traffic: three passes over the
logits; the forward reads them, the backward reads them and writes their gradient. For `linear_cross_entropy`,
which owns its logits, `row_losses` overwrites them with the gradient in the same launch.

Label smoothing: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7. z-loss: Chowdhery
et al., "PaLM" (2022), section 5. Soft cap: Gemma Team, "Gemma 2" (2024), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    contiguous_like,
    once_differentiable,
    use_triton,
)
from liger_models.kernels.losses._cross_entropy_kernels import LossOptions, launch_backward, launch_forward
from liger_models.kernels.losses._logit_tiles import check_softcap, check_temperature, fold_temperature
from liger_models.kernels.losses._reductions import (
    check_labels,
    check_reduction,
    check_weights,
    label_weights,
    loss_denominator,
    reduce_losses,
)


class CrossEntropyOutput(NamedTuple):
    """Results of a cross entropy when more than the loss is requested; None for those not requested."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None


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
    temperature: float = 1.0,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_items: int | Tensor | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of logits, in float32 (float64 for float64 logits). Does not modify the logits.

    logits [N, C] or [N, C, d...], any floating dtype; labels [N] or [N, d...], int64 or int32, in [0, C) or
    equal to `ignore_index`. weight [C] weighs classes, token_weights (of the labels' shape) weigh tokens;
    neither has a gradient. The temperature divides the logits last, after the scale and the cap. reduction
    "none" returns losses of the labels' shape, "sum" their sum. "mean" divides the sum by `num_items` (a
    number, or a tensor of one) if given, else by the sum over valid tokens of class weight times token
    weight, which is their count without weights. The mean over no valid token is nan, as in torch.

    Each of these flags makes the result a CrossEntropyOutput:

    return_z_loss: z_loss, the z-loss's share of the loss, with the same reduction, differentiable.
    return_predicted_tokens: predicted_tokens, int64, of the labels' shape: the class of the largest scaled
        logit, the first among equals, as torch.argmax (the cap and the temperature keep the order, a negative
        logit_scale reverses it; nan counts as the largest), and -1 where the label is `ignore_index`.
    return_token_accuracy: token_accuracy, float32 without a gradient: whether valid tokens were predicted
        correctly. Zeros and ones (zero where ignored) for "none", the count for "sum", the fraction of valid
        tokens for "mean", regardless of weights and num_items; nan without valid tokens.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options, IndexError for a label outside
    the vocabulary. On a GPU such a label triggers a device-side assertion, as in torch.
    """
    options = loss_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_reduction(reduction, num_items)
    _check(logits, labels, ignore_index, weight, token_weights)
    extras = Extras(return_z_loss, return_token_accuracy, return_predicted_tokens)
    fused = use_triton(logits, labels, weight, token_weights)
    rows, row_labels = _as_matrix(logits), labels.reshape(-1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if token_weights is not None:
        token_weights = token_weights.detach().reshape(-1).to(dtype)
    divisor = None
    if reduction == "mean":
        divisor = loss_denominator(row_labels, ignore_index, weight, token_weights, num_items, dtype)

    def reduced(losses: Tensor) -> Tensor:
        return reduce_losses(losses, reduction, token_weights, divisor)

    if fused:
        loss, lse, predicted = _CrossEntropy.apply(
            rows, row_labels, weight, token_weights, divisor, options, reduction, extras
        )
    else:
        losses, lse, predicted = cross_entropy_plain(
            rows, row_labels, weight, options, extras.need_predictions
        )
        loss = reduced(as_once_differentiable(losses, lse)[0])
    return add_extras(loss, extras, lse, predicted, labels, weight, options, reduction, reduced)


def cross_entropy_plain(
    logits: Tensor, labels: Tensor, weight: Tensor | None, options: LossOptions, predict: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Plain twin of `cross_entropy`: loss, log-sum-exp and, with `predict`, predicted token of each row.  [N,
    C], [N], [C] -> [N] each"""
    z = at_least_float32(logits) * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    valid = labels != options.ignore_index
    smoothing = options.label_smoothing
    lse = torch.logsumexp(z, dim=1).where(valid, 0.0)
    label_logit = z.gather(1, labels.where(valid, 0).long().unsqueeze(1)).squeeze(1)
    w_label = label_weights(labels, options.ignore_index, weight, z.dtype)  # [N], zero where ignored
    losses = (1 - smoothing) * w_label * (lse - label_logit)
    if options.z_loss:
        losses = losses + options.z_loss * w_label * lse.square()
    if smoothing:
        w = torch.ones_like(z[:1]) if weight is None else weight.detach().to(z.dtype).unsqueeze(0)
        losses = losses + smoothing / z.shape[1] * (w * (lse.unsqueeze(1) - z)).sum(1)
    predicted = predict_plain(logits, labels, options) if predict else None
    return losses.where(valid, 0.0), lse, predicted


def predict_plain(logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Column of each row's largest scaled logit, -1 where the label is ignored.  [N, C], [N] -> [N]"""
    sign = (options.logit_scale > 0) - (options.logit_scale < 0)
    ordered = logits if sign == 1 else logits * sign
    return ordered.argmax(1).where(labels != options.ignore_index, -1)


def loss_options(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> LossOptions:
    """Options of a row's loss, with the temperature folded into scale and cap; ValueError if invalid."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected a number from 0 to 1")
    check_softcap(softcap)
    check_temperature(temperature)
    scale, cap = fold_temperature(logit_scale, softcap, temperature)
    return LossOptions(ignore_index, float(label_smoothing), float(z_loss), cap, scale)


class Extras(NamedTuple):
    """Results requested in addition to the loss."""

    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool

    @property
    def need_predictions(self) -> bool:
        return self.token_accuracy or self.predicted_tokens


def add_extras(
    loss: Tensor,
    extras: Extras,
    lse: Tensor | None,
    predicted: Tensor | None,
    labels: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    reduction: str,
    reduced: Callable[[Tensor], Tensor],
) -> Tensor | CrossEntropyOutput:
    """Add the requested extras to the loss; without any, return only the loss. A loss of reduction "none",
    lse and predicted are [T], labels [...]; `reduced` reduces losses [T]."""
    shape = labels.shape if reduction == "none" else loss.shape
    loss = loss if loss.shape == shape else loss.view(shape)
    if not any(extras):
        return loss
    z_loss = accuracy = None
    if extras.z_loss:
        assert lse is not None
        w_label = label_weights(labels.reshape(-1), options.ignore_index, weight, lse.dtype)
        z_loss = reduced(options.z_loss * w_label * lse.square()).view(shape)
    predicted = None if predicted is None else predicted.view(labels.shape)
    if extras.token_accuracy:
        valid = labels != options.ignore_index
        right = ((predicted == labels) & valid).float()
        accuracy = right if reduction == "none" else right.sum()
        if reduction == "mean":
            accuracy = accuracy / valid.sum()
    return CrossEntropyOutput(loss, z_loss, accuracy, predicted if extras.predicted_tokens else None)


def _as_matrix(logits: Tensor) -> Tensor:
    """[N, C, d...] as [N d..., C], in the memory order of labels [N, d...]."""
    return as_rows(logits if logits.dim() == 2 else logits.movedim(1, -1))


def _check(logits, labels, ignore_index, weight, token_weights) -> None:
    shape = tuple(logits.shape)
    if len(shape) < 2 or labels.shape != shape[:1] + shape[2:]:
        raise ValueError(
            f"found logits {list(logits.shape)} and labels {list(labels.shape)}; expected [N, C] and [N], or "
            "[N, C, d...] and [N, d...]: flatten logits [batch, seq, C] to [batch * seq, C]"
        )
    check_weights(labels, shape[1], weight, token_weights)
    check_labels(labels, shape[1], ignore_index)


def row_losses(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    grad_scale: Tensor | None = None,
    *,
    grad_lse: Tensor | None = None,
    predict: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, log-sum-exp and, with `predict`, predicted token of each row. Given `grad_scale`, overwrites the
    logits with grad_scale times the loss's gradient plus grad_lse times the log-sum-exp's.

    logits [N, C] with an inner stride of one; labels [N]; grad_scale [N] or [1] and grad_lse, contiguous [N],
    float32 (float64 for float64 logits). Not differentiable; labels outside the vocabulary give nan.
    """
    if use_triton(logits, labels, class_weight):
        return launch_forward(
            logits, labels, class_weight, options, grad_scale=grad_scale, grad_lse=grad_lse, predict=predict
        )
    predicted = predict_plain(logits, labels, options) if predict else None
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
        losses += smoothing / vocab * (w.sum() * lse - (z * w).sum(1))  # autocast would lower z @ w
        factor += smoothing / vocab * w.sum()
    losses = losses.where(inside, float("nan")).where(valid, 0.0)
    if grad_scale is not None:
        outer = grad_scale * options.logit_scale
        factor = factor * outer
        if grad_lse is not None:
            factor = factor + grad_lse * options.logit_scale
        grad = torch.sub(z, lse.unsqueeze(1), out=z).exp_().mul_(factor.unsqueeze(1))
        if smoothing:
            grad -= smoothing / vocab * outer.expand(len(z)).unsqueeze(1) * w
        grad[row, index] -= (1 - smoothing) * w_label * outer
        if tanh is not None:
            grad *= 1 - tanh.square()
        logits.copy_(grad.masked_fill_(~valid.unsqueeze(1), 0.0))
    return losses, lse.where(valid, 0.0), predicted


@cached_tensors()
def _labels_ok(device: torch.device) -> Tensor:
    """An int32 of one per device, shared by all calls: a kernel that zeroes it triggers the assertion."""
    # Copied from the host, which synchronises once (so the first call cannot be captured in a CUDA
    # graph): a fill could run after its readers on another stream.
    return torch.ones((), dtype=torch.int32, device="cpu").to(device)


class _CrossEntropy(torch.autograd.Function):
    """Reduced loss, the rows' log-sum-exps if the z-loss is requested (both differentiable), and predicted
    tokens, from one read of the logits. Reducing here saves small batches the autograd nodes of sum and
    division.
    """

    @staticmethod
    def forward(ctx, logits, labels, class_weight, token_weights, divisor, options, reduction, extras):
        labels_ok = _labels_ok(logits.device) if logits.is_cuda else None
        losses, lse, predicted = launch_forward(
            logits, labels, class_weight, options, labels_ok=labels_ok, predict=extras.need_predictions
        )
        if labels_ok is not None:
            torch._assert_async(labels_ok, f"a label is outside the vocabulary of {logits.shape[1]}")
        ctx.save_for_backward(logits, labels, class_weight, token_weights, divisor, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        loss = reduce_losses(losses, reduction, token_weights, divisor)
        return loss, lse if extras.z_loss else None, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, grad_lse, _):
        logits, labels, class_weight, token_weights, divisor, lse = ctx.saved_tensors
        if grad_loss is None:
            grad_losses = lse.new_zeros(1)
        else:
            grad_losses = grad_loss if divisor is None else grad_loss / divisor
            grad_losses = grad_losses.reshape(-1)  # a single one if the loss is reduced
            if token_weights is not None:
                grad_losses = grad_losses * token_weights
        grad = contiguous_like(logits)
        launch_backward(grad, logits, labels, class_weight, ctx.options, lse, grad_losses, grad_lse)
        return grad, *(None,) * 7
