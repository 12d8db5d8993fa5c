"""A column's terms in a row's divergence and gradient, given both rows' log-sum-exps, in tiles.

With student probabilities q and teacher probabilities p, the gradient with respect to the student's logits is
q r - q sum(q r), where r is the divergence's derivative by q (see `divergence.py`).
"""

from __future__ import annotations

from liger_models.kernels._dispatch import jit, tl
from liger_models.kernels.losses._logit_tiles import fast_log2, load_columns, scaled_logits


@jit
def log_probs(
    student_row_ptr,
    teacher_row_ptr,
    columns,
    vocab,
    student_lse2,
    teacher_lse2,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    KIND,
    HAS_SOFTCAP,
    HAS_TEACHER_SOFTCAP,
    MASKED,
):
    """log2 q, log2 p, and the derivative of the student's cap. Past the row's end both are log2 of zero."""
    student = load_columns(student_row_ptr, columns, vocab, MASKED)
    teacher = load_columns(teacher_row_ptr, columns, vocab, MASKED)
    student, slope = scaled_logits(student, scale, softcap, HAS_SOFTCAP)
    teacher, _ = scaled_logits(teacher, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
    log_q, log_p = student - student_lse2, teacher - teacher_lse2
    if MASKED:
        log_q = tl.where(columns < vocab, log_q, -float("inf"))
        log_p = tl.where(columns < vocab, log_p, -float("inf"))
    if KIND == "jsd":
        # Finite, so that differences are, and below the smallest float32. A nan stays nan.
        log_q = tl.maximum(log_q, -10000.0, propagate_nan=tl.PropagateNan.ALL)
        log_p = tl.maximum(log_p, -10000.0, propagate_nan=tl.PropagateNan.ALL)
    return log_q, log_p, slope


@jit
def _mixture(log_q, log_p, beta):
    """With larger = max(p, q): log2(m / larger), m / larger, the smaller one's share of m, and the distance
    between log2 p and log2 q.
    """
    # Relative to the larger one, so that nothing over- or underflows.
    distance = tl.abs(log_p - log_q)
    p_is_larger = log_p > log_q
    small = tl.where(p_is_larger, 1.0 - beta, beta) * tl.exp2(-distance)
    m = tl.where(p_is_larger, beta, 1.0 - beta) + small
    return fast_log2(m), m, small, distance


@jit
def losses_and_slopes(log_q, log_p, beta, KIND):
    """Terms of a JSD or a total variation, and q r, with logarithms in units of ln 2."""
    if KIND == "jsd":
        log_m, m, small, distance = _mixture(log_q, log_p, beta)
        loss = -tl.exp2(tl.maximum(log_q, log_p)) * (m * log_m + small * distance)
        qr = (beta - 1.0) * tl.exp2(log_q) * (log_m + tl.maximum(log_p - log_q, 0.0))
    else:
        q, p = tl.exp2(log_q), tl.exp2(log_p)
        loss = 0.5 * tl.abs(p - q)
        qr = 0.5 * q * tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
    return loss, qr


@jit
def _logit_gradient(log_q, log_p, sum_of_qr, beta, KIND):
    """q r - q sum_of_qr, with logarithms in units of ln 2."""
    q = tl.exp2(log_q)
    if KIND == "forward_kl":
        grad = q - tl.exp2(log_p)
    elif KIND == "reverse_kl":
        # A product with a zero probability is zero, even if the logarithm is infinite.
        grad = tl.where(q == 0.0, 0.0, q * (log_q - log_p - sum_of_qr))
    elif KIND == "jsd":
        log_m, _m, _small, _distance = _mixture(log_q, log_p, beta)
        grad = q * ((beta - 1.0) * (log_m + tl.maximum(log_p - log_q, 0.0)) - sum_of_qr)
    else:
        p = tl.exp2(log_p)
        grad = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - sum_of_qr)
    return grad


@jit
def write_gradient(
    grad_row_ptr,
    student_row_ptr,
    teacher_row_ptr,
    columns,
    vocab,
    student_lse2,
    teacher_lse2,
    sum_of_qr,
    grad_loss,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    beta,
    KIND,
    HAS_SOFTCAP,
    HAS_TEACHER_SOFTCAP,
):
    """Write the gradient of grad_loss * divergence for some columns of a row; in place if asked."""
    log_q, log_p, slope = log_probs(
        student_row_ptr,
        teacher_row_ptr,
        columns,
        vocab,
        student_lse2,
        teacher_lse2,
        scale,
        softcap,
        teacher_scale,
        teacher_softcap,
        KIND,
        HAS_SOFTCAP,
        HAS_TEACHER_SOFTCAP,
        True,
    )
    factor = grad_loss * scale
    if KIND == "jsd" or KIND == "reverse_kl":
        factor *= 0.6931471805599453
    grad = factor * _logit_gradient(log_q, log_p, sum_of_qr, beta, KIND)
    if HAS_SOFTCAP:
        grad *= slope
    if grad_row_ptr.dtype.element_ty != student_row_ptr.dtype.element_ty:
        # Narrower gradients over wider logits end before the next tile's logits begin, but may cover logits
        # of this tile that another thread has not read yet.
        tl.debug_barrier()
    tl.store(grad_row_ptr + columns, grad.to(grad_row_ptr.dtype.element_ty), mask=columns < vocab)
