"""Scores of given tokens from hidden states: the scores of `log_probs` without materialising all logits.

For a token with hidden state x and label y, the scores are as in `log_probs`, for x W^T + b, computed in
chunks of tokens. If the scores' gradients depend on the scores, the forward keeps its results for each token
and the logits of the last chunk; the backward overwrites these logits with their gradient and recomputes
those of other chunks. That is three matrix products if all tokens fit one chunk, else up to four. If the
gradients are known in advance (`coefficients`: the loss is a weighted sum of log-probabilities, such as a
negative log-likelihood, or a policy gradient on fresh samples, whose ratios are one), the gradient overwrites
each chunk in the forward pass, as in `linear_cross_entropy`: three products.

Tokens without a label are left out of all products. Additional memory: a chunk of logits, from the forward
pass to the end of the backward, which includes the float32 sum of dW if there is more than one chunk. Forward
passes whose backward is pending share one chunk on each device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.kernels.losses._linear_chunks import (
    CHUNK_BYTES,
    KeptLogits,
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
from liger_models.kernels.losses._reductions import check_label_dtype
from liger_models.kernels.losses._score_rows import (
    LOG_PROB,
    RowOptions,
    inverse_temperatures,
    row_options,
    row_scores,
    write_gradient,
)
from liger_models.kernels.losses.log_probs import (
    TokenScores,
    log_probs_plain,
    mark_constants,
    scores_of,
    upstream_gradients,
    wanted_scores,
)


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    coefficients: Tensor | None = None,
    entropy: bool = False,
    top1: bool = False,
    log_sum_sq_probs: bool = False,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenScores:
    """Scores of labels under x @ weight.T + bias, [...] each, in float32 (float64 for float64 inputs), zero
    where the label is `ignore_index`. `log_probs` and `entropy` have gradients for x, weight and bias.

    x [..., H]; weight [V, H] and bias [V] of x's dtype, or of any dtype under autocast, which then determines
    the products' dtype; labels [...], int64 or int32, in [0, V) or equal to `ignore_index`. The temperature
    divides the logits last, after the scale and the cap: one number, or a tensor that broadcasts to the
    labels' shape, without a gradient, which gives nan on a GPU where it is not positive. num_valid and
    chunk_bytes as in `linear_cross_entropy`.

    With coefficients [...], which have no gradient, only `weighted_sum`, the sum of coefficients * log_probs,
    is differentiable, and its gradients are computed in the forward pass.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options, IndexError for a label outside
    the vocabulary. With num_valid, such a label gives nan on a GPU instead.
    """
    options = row_options(ignore_index, softcap, logit_scale, temperature, entropy, top1, log_sum_sq_probs)
    check_operands(x, weight, labels, bias)
    check_label_dtype(labels)
    plan = _Plan(options, product_dtype(x, weight, bias), chunk_bytes, num_valid)
    rows, row_labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    wanted = gradients_wanted(x, weight, bias)
    accumulate = torch.promote_types(plan.dtype, torch.float32)
    inverse = inverse_temperatures(temperature, labels, accumulate)
    if coefficients is None:
        found = _LogProbs.apply(rows, weight, bias, row_labels, inverse, plan, wanted)
        return scores_of(found, labels.shape)
    if coefficients.shape != labels.shape:
        raise ValueError(
            f"coefficients have shape {list(coefficients.shape)}; expected {list(labels.shape)}, as labels"
        )
    coefficients = coefficients.detach().reshape(-1).to(accumulate)
    found = _WeightedSum.apply(rows, weight, bias, row_labels, coefficients, inverse, plan, wanted)
    return scores_of(found, labels.shape)


def linear_log_probs_plain(
    x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options
) -> TokenScores:
    """Plain twin of `linear_log_probs`, with the options of `log_probs_plain`: all logits at once."""
    return log_probs_plain(torch.nn.functional.linear(x, weight, bias), labels, **options)


class _Plan(NamedTuple):
    options: RowOptions
    dtype: torch.dtype  # of the products
    chunk_bytes: int
    num_valid: int | None


class _LogProbs(torch.autograd.Function):
    """log_probs, entropy, is_top1 and log_sum_sq_probs [T]; None where not wanted."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, inverse, plan, wanted):
        keep = any(wanted) and not torch.compiler.is_compiling()
        ctx.kept = KeptLogits(x.device, want_dw=wanted[1]) if keep else None
        found, *_ = _chunked(x, weight, bias, labels, None, inverse, plan, (False,) * 3, kept=ctx.kept)
        ctx.save_for_backward(x, weight, bias, labels, inverse, found)
        ctx.plan = plan
        scores = wanted_scores(found, plan.options)
        mark_constants(ctx, scores[2:])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        x, weight, bias, labels, inverse, found = ctx.saved_tensors
        upstream = upstream_gradients(found, grad_log_probs, grad_entropy)
        given, wanted = (x, weight, bias, labels, inverse, found), ctx.needs_input_grad[:3]
        return *_backward(*given, *upstream, plan=ctx.plan, wanted=wanted, kept=ctx.kept), *(None,) * 4


class _WeightedSum(torch.autograd.Function):
    """Scores of `_LogProbs` without gradients, and the sum of coefficients * log_probs, with its gradients
    stored in ctx."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, coefficients, inverse, plan, wanted):
        operands = x, weight, bias

        def chunked(grad_scale, round_dw):
            found, *grads = _chunked(*operands, labels, grad_scale, inverse, plan, wanted, round_dw)
            return [found[LOG_PROB], found, *grads]

        one = coefficients.new_ones(())
        total, others = reduced_forward(ctx, operands, wanted, plan.dtype, one, coefficients, chunked)
        found: Any = others[0]
        scores = wanted_scores(found, plan.options)
        mark_constants(ctx, scores)
        return *scores, total

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        return *release_gradients(ctx, upstream[-1]), *(None,) * 5


def _chunked(
    x, weight, bias, labels, coefficients, inverse, plan, wanted, round_dw=True, kept=None
) -> list[Any]:
    """Results of `row_scores`, [5, T]; and, where wanted, the gradients of the sum of coefficients [T] times
    the log-probabilities. dW and dbias have their operands' dtypes, or float32 if not round_dw. Without
    gradients the last chunk's logits are left in `kept`.
    """
    if torch.compiler.is_compiling():
        results = _chunked_op(
            x, weight, bias, labels, coefficients, inverse, *plan.options, *plan[1:], *wanted, round_dw
        )
        return drop_absent(results, (True, *wanted))
    index = valid_rows(labels, len(weight), plan.options.ignore_index, plan.num_valid)
    found = at_least_float32(x.new_empty(0, dtype=plan.dtype)).new_zeros(5, len(x))

    def step(chunk, logits):
        known = part_of(coefficients, chunk) if any(wanted) else None
        own = None if inverse is None else inverse[chunk]
        found[:, chunk] = row_scores(logits, labels[chunk], plan.options, known, own)

    grads = in_chunks(
        Linear(x, weight, bias, plan.dtype),
        index,
        step,
        chunk_bytes=plan.chunk_bytes,
        wanted=wanted,
        round_dw=round_dw,
        kept=kept,
    )
    return [found, *grads]


def _backward(
    x, weight, bias, labels, inverse, found, grad_log_probs, grad_entropy, *, plan, wanted, kept=None
):
    """dx, dw, dbias, where wanted."""
    if torch.compiler.is_compiling():
        given = x, weight, bias, labels, inverse, found, grad_log_probs, grad_entropy
        grads = _backward_op(*given, *plan.options, *plan[1:], *wanted)
        return drop_absent(grads, wanted)
    index = valid_rows(labels, len(weight), plan.options.ignore_index, plan.num_valid)

    def step(chunk, logits):
        upstream = grad_log_probs[chunk], grad_entropy[chunk]
        own = None if inverse is None else inverse[chunk]
        write_gradient(logits, labels[chunk], found[:, chunk], *upstream, options=plan.options, inverse=own)

    linear = Linear(x, weight, bias, plan.dtype)
    return in_chunks(linear, index, step, chunk_bytes=plan.chunk_bytes, wanted=wanted, kept=kept)


@torch.library.custom_op("liger_models::linear_log_probs", mutates_args=())
def _chunked_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coefficients: Tensor | None,
    inverse: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    entropy: bool,
    top1: bool,
    log_sum_sq_probs: bool,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
    round_dw: bool,
) -> list[Tensor]:
    """`_chunked` as a single operation of a compiled graph; unwanted gradients are empty tensors."""
    options = RowOptions(ignore_index, softcap, logit_scale, entropy, top1, log_sum_sq_probs)
    plan, wanted = _Plan(options, dtype, chunk_bytes, num_valid), (want_dx, want_dw, want_db)
    return fill_absent(_chunked(x, weight, bias, labels, coefficients, inverse, plan, wanted, round_dw), x)


@_chunked_op.register_fake
def _(x, weight, bias, labels, coefficients, inverse, *rest):
    dtype, (*wanted, round_dw) = rest[6], rest[-4:]
    found = x.new_empty(5, len(x), dtype=torch.promote_types(dtype, torch.float32))
    return [found, *fake_gradients((x, weight, bias), wanted, dtype, round_dw)]


@torch.library.custom_op("liger_models::linear_log_probs_backward", mutates_args=())
def _backward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    inverse: Tensor | None,
    found: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    entropy: bool,
    top1: bool,
    log_sum_sq_probs: bool,
    dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
) -> list[Tensor]:
    """`_backward` as a single operation of a compiled graph; unwanted gradients are empty tensors."""
    options = RowOptions(ignore_index, softcap, logit_scale, entropy, top1, log_sum_sq_probs)
    plan, wanted = _Plan(options, dtype, chunk_bytes, num_valid), (want_dx, want_dw, want_db)
    given = x, weight, bias, labels, inverse, found, grad_log_probs, grad_entropy
    return fill_absent(_backward(*given, plan=plan, wanted=wanted), x)


@_backward_op.register_fake
def _(x, weight, bias, *rest):
    return fake_gradients((x, weight, bias), wanted=rest[-3:], dtype=x.dtype)
