"""Distillation from hidden states: the divergence between two linear layers' outputs, whose logits never
exist all at once.

    student = x W^T + b,   teacher = x' W'^T + b',
    row losses of `generalized_jsd`, or 1 - cos(student, teacher)

Tokens are taken in chunks, as in `linear_cross_entropy`: the gradient of a chunk is written over the
student's logits and goes into dx and the sum of dW at once, in the forward pass, for an upstream gradient
of one; the backward pass has only to multiply by the true one. The teacher is a constant: its layer costs
one product. Tokens without a label are left out of all products. Memory beside the results: two chunks of
logits, and the float32 sum of dW if there is more than one chunk.

JSD: Agarwal et al., "On-Policy Distillation of Language Models" (2023). The slope of the cosine of s and t,
with lengths |s|, |t|, is dcos/ds = (t / |t| - cos s / |s|) / |s|.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_models.kernels._dispatch import (
    at_least_float32,
    jit,
    next_power_of_2,
    on_device_of,
    tl,
    use_triton,
)
from liger_models.kernels._linear_chunks import LogitsBuffer, in_chunks
from liger_models.kernels.cross_entropy import _load, _stride
from liger_models.kernels.divergence import (
    DivergenceOptions,
    check_reduction,
    divergence_plain,
    jsd_options,
    mean_divisor,
    row_divergences,
)
from liger_models.kernels.linear_cross_entropy import (
    CHUNK_BYTES,
    _check_operands,
    _product_dtype,
    _valid_rows,
    release_gradients,
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
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """generalized_jsd(student_x @ student_weight.T + student_bias, the same of the teacher), in float32
    (float64 for a float64 student). beta 0 is KL(teacher || student), beta 1 is KL(student || teacher).

    student_x [..., H], student_weight [V, H], student_bias [V] of one dtype, or of any under autocast, whose
    dtype the products then take; teacher_x [..., H'], teacher_weight [V, H'], teacher_bias [V] likewise,
    constants to autograd. labels [...], if given, say which tokens count: those whose label is not
    `ignore_index`; the others are left out of the products. Reductions are those of `generalized_jsd`.

    Gradients are computed for those of the student's operands that require them, in the forward pass; with
    reduction "none" in the backward pass, which makes the logits again. num_valid, the count of labels that
    differ from `ignore_index`, spares a GPU the wait for it, as in `linear_cross_entropy`. chunk_bytes is the
    memory to spend beside the results; a chunk has 1,024 tokens at least, however little that is.

    Raises ValueError or TypeError for shapes, dtypes and options that do not fit, IndexError for a label
    outside the vocabulary unless num_valid vouches for them.
    """
    options = jsd_options(beta, temperature, ignore_index)
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
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """KL(teacher || student) of two linear layers' outputs: `linear_jsd`, which tells the rest at beta 0."""
    options = jsd_options(0.0, temperature, ignore_index)
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
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    num_valid: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """One minus the cosine between a student's and a teacher's row of logits, of two linear layers.

    Shapes, options and errors are those of `linear_jsd`. Lengths below 1e-8 count as 1e-8, as in torch's
    cosine_similarity, and there have no slope.
    """
    options = DivergenceOptions("cosine", 0.0, 1.0, ignore_index)
    student, teacher = (student_x, student_weight, student_bias), (teacher_x, teacher_weight, teacher_bias)
    return _distillation(student, teacher, labels, options, reduction, num_items, num_valid, chunk_bytes)


def linear_divergence_plain(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None],
    labels: Tensor | None,
    options: DivergenceOptions,
) -> Tensor:
    """The plain twin of all three, with all logits at once: each token's loss, of x [T, H], weight, bias."""
    student_logits = torch.nn.functional.linear(*student)
    with torch.no_grad():
        teacher_logits = torch.nn.functional.linear(*teacher)
    if options.kind != "cosine":
        return divergence_plain(student_logits, teacher_logits, labels, options)
    student_logits = at_least_float32(student_logits)
    directions = [
        torch.nn.functional.normalize(logits, dim=1, eps=_SMALLEST_LENGTH)
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
        _check_operands(x, weight, x[..., 0] if labels is None else labels, bias)
    if len(student[1]) != len(teacher[1]):
        raise ValueError(
            f"the student's weight {list(student[1].shape)} and the teacher's {list(teacher[1].shape)} "
            "differ in their vocabularies; a divergence needs one vocabulary"
        )
    if labels is not None and labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}; expected int64 or int32")
    plan = _Plan(options, _product_dtype(*student), _product_dtype(*teacher), chunk_bytes, num_valid)
    labels = None if labels is None else labels.reshape(-1)
    student, teacher = ((x.reshape(-1, x.shape[-1]), weight, bias) for x, weight, bias in (student, teacher))
    teacher = tuple(None if operand is None else operand.detach() for operand in teacher)
    if reduction == "none":
        return _TokenDivergences.apply(*student, *teacher, labels, plan).view(shape)
    inverse = at_least_float32(student[0].new_empty(0)).new_ones(())
    if reduction == "mean":
        count = num_valid if num_items is None and num_valid is not None and labels is not None else num_items
        inverse = mean_divisor(labels, len(student[0]), options.ignore_index, count, inverse).reciprocal()
    wanted = tuple(
        torch.is_grad_enabled() and operand is not None and operand.requires_grad for operand in student
    )
    return _ReducedDivergence.apply(*student, *teacher, labels, inverse, plan, wanted)


class _ReducedDivergence(torch.autograd.Function):
    """The sum of all rows' losses times `inverse`; its gradients wait in ctx for the upstream one."""

    @staticmethod
    def forward(ctx, x, weight, bias, teacher_x, teacher_weight, teacher_bias, labels, inverse, plan, wanted):
        # float16 would lose gradients divided by the count of tokens: there the divisor waits for the
        # backward pass, where it meets the loss scale that is meant to keep gradients in range.
        late = plan.dtype == torch.float16
        grad_scale = (torch.ones_like(inverse) if late else inverse).reshape(1)
        student, teacher = (x, weight, bias), (teacher_x, teacher_weight, teacher_bias)
        losses, *grads = _chunked(student, teacher, labels, grad_scale, plan, wanted, round_dw=not late)
        ctx.dtypes = [operand.dtype if want else None for operand, want in zip(student, wanted, strict=True)]
        ctx.grads = grads
        ctx.inverse = inverse if late else None
        ctx.set_materialize_grads(False)
        return losses.sum() * inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return *release_gradients(ctx, upstream), *(None,) * 7


class _TokenDivergences(torch.autograd.Function):
    """Each row's loss. The rows' upstream gradients enter every sum, so backward makes the logits anew."""

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
    """The loss of each row [T], and the gradients of grad_scale ([1] or [T]) times it where wanted."""
    if torch.compiler.is_compiling():
        results = _chunked_op(
            *student, *teacher, labels, grad_scale, *plan.options, *plan[1:], *wanted, round_dw
        )
        return results[0], *(grad if want else None for grad, want in zip(results[1:], wanted, strict=True))

    x, weight, bias = student
    teacher_x, teacher_weight, teacher_bias = teacher
    options, vocab = plan.options, len(weight)
    index = None
    if labels is not None:
        index = _valid_rows(labels, vocab, options.ignore_index, plan.num_valid)
    losses = at_least_float32(x.new_empty(0, dtype=plan.dtype)).new_zeros(len(x))
    teacher_buffer = None

    def step(logits, chunk):
        nonlocal teacher_buffer
        if teacher_buffer is None:  # the first chunk is the largest
            teacher_buffer = LogitsBuffer(teacher_weight, teacher_bias, plan.teacher_dtype, len(logits))
        teacher_logits = teacher_buffer.fill(teacher_x[chunk].to(plan.teacher_dtype))
        scale = None
        if any(wanted):
            scale = grad_scale if len(grad_scale) == 1 else grad_scale[chunk]
        rows = row_cosine_distances if options.kind == "cosine" else row_divergences
        labels_chunk = None if labels is None else labels[chunk]
        losses[chunk] = rows(logits, teacher_logits, labels_chunk, options, scale)

    grads = in_chunks(
        x,
        weight,
        bias,
        index,
        step,
        dtype=plan.dtype,
        row_bytes=vocab * (plan.dtype.itemsize + plan.teacher_dtype.itemsize),
        chunk_bytes=plan.chunk_bytes,
        wanted=wanted,
        round_dw=round_dw,
    )
    return losses, *grads


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
    beta: float,
    temperature: float,
    ignore_index: int,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    chunk_bytes: int,
    num_valid: int | None,
    want_dx: bool,
    want_dw: bool,
    want_db: bool,
    round_dw: bool,
) -> list[Tensor]:
    """`_chunked` as one operation of a compiled graph; a gradient that is not wanted is an empty tensor."""
    options = DivergenceOptions(kind, beta, temperature, ignore_index)
    plan = _Plan(options, dtype, teacher_dtype, chunk_bytes, num_valid)
    teacher = (teacher_x, teacher_weight, teacher_bias)
    wanted = (want_dx, want_dw, want_db)
    results = _chunked((x, weight, bias), teacher, labels, grad_scale, plan, wanted, round_dw)
    return [x.new_empty(0) if result is None else result for result in results]


@_chunked_op.register_fake
def _(x, weight, bias, *rest):
    dtype, (want_dx, want_dw, want_db, round_dw) = rest[9], rest[-4:]
    sum_dtype = torch.promote_types(dtype, torch.float32)

    def grad(want, operand):
        if not want:
            return x.new_empty(0)
        return operand.new_empty(
            operand.shape, dtype=operand.dtype if round_dw or operand is x else sum_dtype
        )

    losses = x.new_empty(len(x), dtype=sum_dtype)
    return [losses, grad(want_dx, x), grad(want_dw, weight), grad(want_db, bias)]


_SMALLEST_LENGTH = 1e-8


def row_cosine_distances(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    options: DivergenceOptions,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """One minus each pair of rows' cosine [N]; operands and the gradient's place as in `row_divergences`."""
    if use_triton(student_logits, teacher_logits):
        rows, vocab = student_logits.shape
        losses = torch.zeros(rows, dtype=torch.float32, device=student_logits.device)
        block = min(next_power_of_2(vocab), _COSINE_BLOCK)
        with on_device_of(student_logits):
            _cosine_kernel[(rows,)](
                student_logits,
                teacher_logits,
                labels,
                student_logits.stride(0),
                teacher_logits.stride(0),
                0 if labels is None else labels.stride(0),
                vocab,
                options.ignore_index,
                losses,
                grad_scale,
                _stride(grad_scale),
                SMALLEST=_SMALLEST_LENGTH,
                BLOCK=block,
                num_warps=max(1, block // 512),
            )
        return losses
    student = at_least_float32(student_logits)
    teacher = at_least_float32(teacher_logits).to(student.dtype)
    student_length = student.norm(dim=1, keepdim=True)
    student = student / student_length.clamp(min=_SMALLEST_LENGTH)
    teacher = teacher / teacher.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_LENGTH)
    cosines = (student * teacher).sum(1, keepdim=True)
    ignored = False if labels is None else (labels == options.ignore_index).unsqueeze(1)
    ignored = torch.as_tensor(ignored, device=cosines.device)
    if grad_scale is not None:
        # Where a length counts as the smallest one it is a constant, and has no slope.
        slope = cosines.where(student_length > _SMALLEST_LENGTH, 0.0) * student - teacher
        grad = slope * (grad_scale.unsqueeze(1) / student_length.clamp(min=_SMALLEST_LENGTH))
        student_logits.copy_(grad.masked_fill(ignored, 0.0))
    return (1 - cosines).masked_fill(ignored, 0.0).squeeze(1)


_COSINE_BLOCK = 4096


@jit
def _cosine_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    student_stride,
    teacher_stride,
    labels_stride,
    vocab,
    ignore_index,
    losses_ptr,
    grad_scale_ptr,
    grad_scale_stride,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. Given grad_scale, the gradient replaces the student's row.  losses, zero before"""
    row = tl.program_id(0).to(tl.int64)
    student_row_ptr = student_ptr + row * student_stride
    teacher_row_ptr = teacher_ptr + row * teacher_stride
    grad_scale = 0.0
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr + row * grad_scale_stride)
    counts = True
    if labels_ptr is not None:
        counts = tl.load(labels_ptr + row * labels_stride) != ignore_index
    product = tl.zeros([BLOCK], tl.float32)
    student_squares = tl.zeros([BLOCK], tl.float32)
    teacher_squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        student = _load(student_row_ptr, columns, vocab, True)
        teacher = _load(teacher_row_ptr, columns, vocab, True)
        product += student * teacher
        student_squares += student * student
        teacher_squares += teacher * teacher
    student_length = tl.sqrt(tl.sum(student_squares, 0))
    inverse = 1.0 / tl.maximum(student_length, SMALLEST)
    teacher_inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(teacher_squares, 0)), SMALLEST)
    cosine = tl.sum(product, 0) * inverse * teacher_inverse
    tl.store(losses_ptr + row, 1.0 - cosine, mask=counts)
    if grad_scale_ptr is not None:
        # Where a length counts as the smallest one it is a constant, and has no slope.
        radial = tl.where(student_length > SMALLEST, cosine, 0.0) * inverse
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            student = _load(student_row_ptr, columns, vocab, True)
            teacher = _load(teacher_row_ptr, columns, vocab, True)
            grad = grad_scale * inverse * (radial * student - teacher_inverse * teacher)
            grad = tl.where(counts, grad, 0.0).to(student_ptr.dtype.element_ty)
            tl.store(student_row_ptr + columns, grad, mask=columns < vocab)
