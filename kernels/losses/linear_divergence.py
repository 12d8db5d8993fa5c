"""Distillation from hidden states: divergence of two linear layers' outputs, without materialising all
logits.

    student = x W^T + b,   teacher = x' W'^T + b',
    row losses of `generalized_jsd`, or 1 - cos(student, teacher)

Tokens are processed in chunks, as in `linear_cross_entropy`: in the forward pass a chunk's gradient, for an
upstream gradient of one, overwrites the student's logits and is accumulated into dx and dW at once; the
backward pass only multiplies by the true one. The teacher is a constant: its layer costs one product. Tokens
without a label are left out of all products. Additional memory: two chunks of logits, and the float32 sum of
dW if there is more than one chunk.

Logits of a JSD or a KL divergence are not rounded to 16 bits. Their gradient consists of probabilities, whose
relative error is a logit's absolute error: 2% for a logit of 10 in bfloat16, more than all other rounding.

JSD: Agarwal et al., "On-Policy Distillation of Language Models" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import at_least_float32, once_differentiable
from liger_models.kernels.losses._cosine_rows import SMALLEST_LENGTH, row_cosine_distances
from liger_models.kernels.losses._divergence_options import DivergenceOptions
from liger_models.kernels.losses._linear_chunks import (
    CHUNK_BYTES,
    Linear,
    check_operands,
    drop_absent,
    fake_gradients,
    fill_absent,
    gradient_view,
    gradients_wanted,
    in_chunks,
    part_of,
    product_dtype,
    reduced_forward,
    release_gradients,
    valid_rows,
)
from liger_models.kernels.losses._logit_tiles import cap_logits
from liger_models.kernels.losses._reductions import check_label_dtype, check_reduction, mean_divisor
from liger_models.kernels.losses.divergence import (
    divergence_options,
    divergence_plain,
    jsd_kind,
    row_divergences,
)


def linear_jsd(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """generalized_jsd of two linear layers' outputs, x @ weight.T + bias of student and teacher, in float32
    (float64 for a float64 student). beta 0 is KL(teacher || student), beta 1 is KL(student || teacher).

    student_x [..., H], student_weight [V, H], student_bias [V] of one dtype, or of any dtypes under autocast,
    which then determines the products' dtype; teacher_x [..., H'], teacher_weight [V, H'], teacher_bias [V]
    likewise, without gradients. labels [...], if given, select tokens: those whose label is not
    `ignore_index`; others are left out of the products. Reductions, scales and caps as in `generalized_jsd`.

    Gradients are computed for those of the student's operands that require them, in the forward pass; with
    reduction "none" in the backward pass, which recomputes the logits. num_valid, the count of labels that
    differ from `ignore_index`, avoids synchronising a GPU, as in `linear_cross_entropy`. chunk_bytes is the
    additional memory to use; a chunk has at least 1,024 tokens regardless.

    Raises ValueError or TypeError for incompatible shapes, dtypes or options, IndexError for a label outside
    the vocabulary unless num_valid is given.
    """
    options = divergence_options(
        jsd_kind(beta),
        ignore_index,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    student, teacher = (student_x, student_weight, student_bias), (teacher_x, teacher_weight, teacher_bias)
    return _distillation(student, teacher, labels, options, reduction, num_items, num_valid, chunk_bytes)


def linear_kl(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """KL(teacher || student) of two linear layers' outputs: `linear_jsd` at beta 0; see there."""
    options = divergence_options(
        "forward_kl",
        ignore_index,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    student, teacher = (student_x, student_weight, student_bias), (teacher_x, teacher_weight, teacher_bias)
    return _distillation(student, teacher, labels, options, reduction, num_items, num_valid, chunk_bytes)


def linear_cosine_distillation(
    student_x: Tensor,
    student_weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """One minus the cosine between rows of student and teacher logits, outputs of two linear layers, each
    scaled and capped.

    Shapes, options and errors as in `linear_jsd`. Norms below 1e-8 count as 1e-8, as in torch's
    cosine_similarity, and have no gradient.
    """
    options = divergence_options(
        "cosine",
        ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )
    student, teacher = (student_x, student_weight, student_bias), (teacher_x, teacher_weight, teacher_bias)
    return _distillation(student, teacher, labels, options, reduction, num_items, num_valid, chunk_bytes)


def linear_divergence_plain(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    labels: Tensor | None,
    options: DivergenceOptions,
) -> Tensor:
    """Plain twin of all three losses, with all logits at once: the loss of each token of x [T, H]."""
    student_logits = torch.nn.functional.linear(*student)
    with torch.no_grad():
        teacher_logits = torch.nn.functional.linear(*teacher)
    if options.kind != "cosine":
        return divergence_plain(student_logits, teacher_logits, labels, options)
    student_logits, _ = cap_logits(student_logits, *options.student_scaling)
    teacher_logits, _ = cap_logits(teacher_logits, *options.teacher_scaling)
    directions = [
        torch.nn.functional.normalize(logits, dim=1, eps=SMALLEST_LENGTH)
        for logits in (student_logits, teacher_logits.to(student_logits.dtype))
    ]
    cosines = (directions[0] * directions[1]).sum(1)
    return (1 - cosines) if labels is None else (1 - cosines).where(labels != options.ignore_index, 0.0)


class _Plan(NamedTuple):
    options: DivergenceOptions
    dtype: torch.dtype  # of the student's products
    teacher_dtype: torch.dtype
    chunk_bytes: int
    num_valid: int | None


def _distillation(student, teacher, labels, options, reduction, num_items, num_valid, chunk_bytes) -> Tensor:
    check_reduction(reduction, num_items)
    shape = student[0].shape[:-1]
    if teacher[0].shape[:-1] != shape:
        raise ValueError(
            f"found student_x {list(student[0].shape)} and teacher_x {list(teacher[0].shape)}; expected both "
            "[..., H], of the same tokens"
        )
    for x, weight, bias in (student, teacher):
        check_operands(x, weight, x[..., 0] if labels is None else labels, bias)
    if len(student[1]) != len(teacher[1]):
        raise ValueError(
            f"the student's weight {list(student[1].shape)} and the teacher's {list(teacher[1].shape)} "
            "differ in their vocabularies; a divergence needs one vocabulary"
        )
    if labels is not None:
        check_label_dtype(labels)
    plan = _Plan(options, product_dtype(*student), product_dtype(*teacher), chunk_bytes, num_valid)
    labels = None if labels is None else labels.reshape(-1)
    student, teacher = ((x.reshape(-1, x.shape[-1]), weight, bias) for x, weight, bias in (student, teacher))
    teacher = tuple(None if operand is None else operand.detach() for operand in teacher)
    if reduction == "none":
        return _TokenDivergences.apply(*student, *teacher, labels, plan).view(shape)
    inverse = at_least_float32(student[0].new_empty(0)).new_ones(())
    if reduction == "mean":
        count = num_valid if num_items is None and num_valid is not None and labels is not None else num_items
        inverse = mean_divisor(labels, len(student[0]), options.ignore_index, count, inverse).reciprocal()
    wanted = gradients_wanted(*student)
    return _ReducedDivergence.apply(*student, *teacher, labels, inverse, plan, wanted)


class _ReducedDivergence(torch.autograd.Function):
    """Sum of all rows' losses times `inverse`, with its gradients stored in ctx."""

    @staticmethod
    def forward(ctx, x, weight, bias, teacher_x, teacher_weight, teacher_bias, labels, inverse, plan, wanted):
        student, teacher = (x, weight, bias), (teacher_x, teacher_weight, teacher_bias)

        def chunked(grad_scale, round_dw):
            return _chunked(student, teacher, labels, grad_scale, plan, wanted, round_dw)

        return reduced_forward(ctx, student, wanted, plan.dtype, inverse, None, chunked)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return *release_gradients(ctx, upstream), *(None,) * 7


class _TokenDivergences(torch.autograd.Function):
    """Loss of each row. The rows' upstream gradients enter every sum, so backward recomputes the logits."""

    @staticmethod
    def forward(ctx, x, weight, bias, teacher_x, teacher_weight, teacher_bias, labels, plan):
        student, teacher = (x, weight, bias), (teacher_x, teacher_weight, teacher_bias)
        ctx.save_for_backward(*student, *teacher, labels)
        ctx.plan = plan
        return _chunked(student, teacher, labels, None, plan, (False,) * 3)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        *operands, labels = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        upstream = upstream.contiguous()
        _, *grads = _chunked(operands[:3], operands[3:], labels, upstream, ctx.plan, wanted)
        return *grads, *(None,) * 5


def _chunked(student, teacher, labels, grad_scale, plan, wanted, round_dw=True):
    """Loss of each row [T], and the gradients of grad_scale ([1] or [T]) times it where wanted."""
    if torch.compiler.is_compiling():
        results = _chunked_op(
            *student, *teacher, labels, grad_scale, *plan.options, *plan[1:], *wanted, round_dw
        )
        return drop_absent(results, (True, *wanted))

    x, weight, bias = student
    teacher_x, teacher_weight, teacher_bias = teacher
    options, index = plan.options, None
    if labels is not None:
        index = valid_rows(labels, len(weight), options.ignore_index, plan.num_valid)
    losses = at_least_float32(x.new_empty(0, dtype=plan.dtype)).new_zeros(len(x))

    def step(chunk, logits, teacher_logits):
        scale = part_of(grad_scale, chunk) if any(wanted) else None
        rows = logits, teacher_logits, None if labels is None else labels[chunk], options, scale
        if options.kind == "cosine":
            losses[chunk] = row_cosine_distances(*rows)
        else:
            losses[chunk] = row_divergences(*rows, gradient_view(logits, plan.dtype))

    def linear(x, weight, bias, dtype):
        rounded = options.kind == "cosine"
        return Linear(x, weight, bias, dtype, dtype if rounded else torch.promote_types(dtype, torch.float32))

    grads = in_chunks(
        linear(x, weight, bias, plan.dtype),
        index,
        step,
        chunk_bytes=plan.chunk_bytes,
        wanted=wanted,
        round_dw=round_dw,
        teacher=linear(teacher_x, teacher_weight, teacher_bias, plan.teacher_dtype),
    )
    return [losses, *grads]


@torch.library.custom_op("liger_models::linear_divergence", mutates_args=())
def _chunked_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    labels: Tensor | None,
    grad_scale: Tensor | None,
    kind: str,
    ignore_index: int,
    beta: float,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    teacher_softcap: float | None,
    teacher_logit_scale: float,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
    round_dw: bool,
) -> list[Tensor]:
    """`_chunked` as a single operation of a compiled graph; unwanted gradients are empty tensors."""
    options = DivergenceOptions(
        kind,
        ignore_index,
        beta,
        temperature,
        softcap,
        logit_scale,
        teacher_softcap,
        teacher_logit_scale,
    )
    plan = _Plan(options, dtype, teacher_dtype, chunk_bytes, num_valid)
    teacher = (teacher_x, teacher_weight, teacher_bias)
    wanted = (want_dx, want_dw, want_db)
    results = _chunked((x, weight, bias), teacher, labels, grad_scale, plan, wanted, round_dw)
    return fill_absent(results, x)


@_chunked_op.register_fake
def _(x, weight, bias, *rest):
    dtype, (*wanted, round_dw) = rest[13], rest[-4:]
    losses = x.new_empty(len(x), dtype=torch.promote_types(dtype, torch.float32))
    return [losses, *fake_gradients((x, weight, bias), wanted, dtype, round_dw)]
