"""Divergences between a student's and a teacher's distributions, from logits and from hidden states.

The teacher has no gradient. liger-kernel's divergences of logits take probabilities or log-probabilities,
which torch computes here in float32: in 16 bits they are too coarse to pass the check.
"""

from __future__ import annotations

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.core import Cost, liger, normal, operation, standard_case, wide
from benchmarks.operations.losses import HEAD, LOGIT_SCALE, ONE_HEAD, head, truth_in_chunks
from liger_models import kernels


def _log_probs(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    return wide(student).log_softmax(-1), teacher.to(wide(student).dtype).log_softmax(-1)


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Each row's KL(teacher || student), of logits [N, V]."""
    log_q, log_p = _log_probs(student, teacher)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)


def jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Each row's Jensen-Shannon divergence."""
    log_q, log_p = _log_probs(student, teacher)
    log_m = torch.logaddexp(log_q, log_p) - log(2)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(1)


def total_variation(student: Tensor, teacher: Tensor) -> Tensor:
    log_q, log_p = _log_probs(student, teacher)
    return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(wide(student), teacher.to(wide(student).dtype), dim=-1)


LOGITS = {"shapes": ((8192, 128256),), "tiny": (64, 1000)}
NOTE = "takes probabilities, made by torch in float32"


@operation(
    "total_variation",
    "tokens x vocabulary",
    **LOGITS,
    divergence=total_variation,
    peer="LigerTVDLossFunction",
    call=lambda apply, log_q, log_p: apply(log_q.exp(), log_p.exp()),
)
@operation(
    "generalized_jsd",
    "tokens x vocabulary",
    **LOGITS,
    divergence=jsd,
    peer="LigerJSDFunction",
    call=lambda apply, log_q, log_p: apply(log_q, log_p),
)
@operation(
    "kl_div",
    "tokens x vocabulary",
    **LOGITS,
    divergence=kl,
    peer="LigerKLDivLossFunction",
    call=lambda apply, log_q, log_p: apply(log_q, log_p, "batchmean", True),
)
def _divergence(shape, dtype, device, divergence, peer, call):
    student, teacher = (normal(shape, dtype, device, LOGIT_SCALE) for _ in range(2))
    ours = {kl: "kl_div", jsd: "generalized_jsd", total_variation: "total_variation"}[divergence]
    return standard_case(
        (student,),
        (torch.ones((), device=device),),
        ours=lambda student: getattr(kernels, ours)(student, teacher),
        liger=liger(peer, lambda apply, student: call(apply, *_log_probs(student, teacher)), note=NOTE),
        eager=lambda student: divergence(student, teacher).mean(),
        # Forward: student and teacher in. Backward: both in again, the student's gradient out.
        training=Cost(5 * student.nbytes),
        truth=lambda: truth_in_chunks(
            lambda part, rows: divergence(rows, teacher[part]) / len(student), student, (), torch.float64
        ),
    )


def _fused_cosine(apply, x, weight, teacher_x, teacher_weight):
    """Only the soft part of its loss; the labels then only select tokens."""
    labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
    return apply(x, weight, teacher_x, teacher_weight, labels, None, None, 0.0, 1.0, 1.0)


@operation(
    "linear_cosine_distillation",
    HEAD,
    **ONE_HEAD,
    divergence=cosine_distance,
    peer=("LigerFusedLinearCosineSimilarityFunction", _fused_cosine, "chunked_loss.cosine_similarity_loss"),
)
@operation(
    "linear_kl",
    HEAD,
    **ONE_HEAD,
    divergence=kl,
    peer=("LigerFusedLinearJSDFunction", lambda apply, *operands: apply(*operands, None, 0.0)),
)
@operation(
    "linear_jsd",
    HEAD,
    **ONE_HEAD,
    divergence=jsd,
    peer=("LigerFusedLinearJSDFunction", lambda apply, *operands: apply(*operands, None, 0.5)),
)
def _linear_divergence(shape, dtype, device, divergence, peer):
    """Student and teacher of one size."""
    tokens, hidden, vocab = shape
    (x, weight), teacher = head(shape, dtype, device), head(shape, dtype, device)
    name, call, *module = peer
    ours = {kl: "linear_kl", jsd: "linear_jsd", cosine_distance: "linear_cosine_distillation"}[divergence]

    def token_losses(part, x, weight):
        teacher_x, teacher_weight = (operand.to(x.dtype) for operand in (teacher[0][part], teacher[1]))
        return divergence(F.linear(x, weight), F.linear(teacher_x, teacher_weight)) / tokens

    return standard_case(
        (x, weight),
        (torch.ones((), device=device),),
        ours=lambda x, weight: getattr(kernels, ours)(x, weight, *teacher),
        liger=liger(name, lambda apply, x, weight: call(apply, x, weight, *teacher), *module),
        eager=lambda x, weight: divergence(F.linear(x, weight), F.linear(*teacher)).mean(),
        training=Cost(flops=8 * tokens * hidden * vocab),  # four products: the teacher's logits too
        truth=lambda: truth_in_chunks(token_losses, x, (weight,), torch.float32),
    )
