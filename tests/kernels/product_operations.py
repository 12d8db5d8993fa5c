"""Operations under test that compute matrix products, which may sum in another order in another layout."""

import torch
import torch.nn.functional as F
from eager_operations import (
    eager_attention,
    eager_clamped_experts,
    eager_experts,
    eager_experts_of_weighted,
    eager_jsd,
    eager_kl,
    eager_log_probs,
    eager_plain_experts,
    eager_route,
    experts_of,
    labels_of,
    logits_of,
    wide,
)
from moe_problem import folded
from operation_runs import Operation, documents_of

from liger_models.kernels import (
    ClampedSwiGLU,
    ExpertPath,
    attention,
    linear_cosine_distillation,
    linear_cross_entropy,
    linear_jsd,
    linear_kl,
    linear_log_probs,
    moe_experts,
    route,
)


def coefficients_of(x):
    """Coefficients [T] of both signs, each computed from its own row of x [T, ...]."""
    last = wide(x.detach()[:, -1])
    return torch.full_like(last, 1.75).masked_fill(last > 0, -0.5)


VOCAB, EXPERTS, INTERMEDIATE = 37, 5, 6


def linear_shapes(rows, width):
    return [(rows, width), (VOCAB, width)]


def teacher_shapes(rows, width):  # the teacher's layer is narrower
    return [*linear_shapes(rows, width), (rows, max(1, width // 2)), (VOCAB, max(1, width // 2))]


def distilled(divergence):
    return lambda x, w, *teacher: divergence(x, w, *(t.to(x.dtype) for t in teacher), reduction="none")


def eager_distilled(divergence):
    return lambda x, w, *teacher: divergence(logits_of(x, w), logits_of(*(t.to(x.dtype) for t in teacher)))


WITH_PRODUCTS = {
    "linear_cross_entropy": Operation(
        lambda x, w: linear_cross_entropy(x, w, labels_of(x, VOCAB), reduction="none"),
        lambda x, w: F.cross_entropy(logits_of(x, w), labels_of(x, VOCAB), reduction="none"),
        linear_shapes,
    ),
    "linear_cross_entropy_summed": Operation(
        lambda x, w: linear_cross_entropy(x, w, labels_of(x, VOCAB), reduction="sum"),
        lambda x, w: F.cross_entropy(logits_of(x, w), labels_of(x, VOCAB), reduction="sum"),
        linear_shapes,
    ),
    "linear_log_probs": Operation(
        lambda x, w: linear_log_probs(x, w, labels_of(x, VOCAB), entropy=True)[:2],
        eager_log_probs,
        linear_shapes,
    ),
    "linear_log_probs_weighted": Operation(
        lambda x, w: (
            linear_log_probs(x, w, labels_of(x, VOCAB), coefficients=coefficients_of(x)).weighted_sum
        ),
        lambda x, w: (coefficients_of(x) * eager_log_probs(x, w)[0]).sum(),
        linear_shapes,
    ),
    "linear_kl": Operation(distilled(linear_kl), eager_distilled(eager_kl), teacher_shapes, tables=2),
    "linear_jsd": Operation(
        distilled(linear_jsd),
        eager_distilled(lambda student, teacher: eager_jsd(student, teacher, 0.5)),
        teacher_shapes,
        tables=2,
    ),
    "linear_cosine_distillation": Operation(
        distilled(linear_cosine_distillation),
        eager_distilled(lambda student, teacher: 1 - F.cosine_similarity(student, teacher)),
        teacher_shapes,
        tables=2,
    ),
    "moe_experts": Operation(
        lambda x, weights, *experts: moe_experts(x, weights, experts_of(weights, EXPERTS), *experts),
        eager_experts,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_of_weighted": Operation(
        lambda x, weights, *experts: moe_experts(
            x, weights, experts_of(weights, EXPERTS), *experts, weighted="inputs"
        ),
        eager_experts_of_weighted,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_with_paths": Operation(
        lambda x, weights, gate_up, down, *ab: moe_experts(
            *(x, weights, experts_of(weights, EXPERTS), gate_up, down),
            gate_up_paths=[ExpertPath(*ab[:2], 2.0)],
            down_paths=[ExpertPath(*ab[2:], 0.5)],
        ),
        lambda x, weights, gate_up, down, *ab: eager_experts(
            x, weights, folded(gate_up, [(*ab[:2], 2.0)]), folded(down, [(*ab[2:], 0.5)])
        ),
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
            (3 * EXPERTS, width),
            (2 * INTERMEDIATE, 3 * EXPERTS),
            (5 * EXPERTS, INTERMEDIATE),
            (width, 5 * EXPERTS),
        ],
    ),
    "moe_experts_without_gates": Operation(
        lambda x, weights, *experts: moe_experts(x, weights, experts_of(weights, EXPERTS), *experts, "relu2"),
        eager_plain_experts,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_biased": Operation(
        lambda x, weights, gate_up, down, *biases: moe_experts(
            x, weights, experts_of(weights, EXPERTS), gate_up, down, ClampedSwiGLU(1.3, 0.8), *biases
        ),
        lambda *operands: eager_clamped_experts(*operands, 1.3, 0.8),
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
            (EXPERTS, 2 * INTERMEDIATE),
            (EXPERTS, width),
        ],
    ),
    "attention": Operation(
        lambda q, k, v, sinks: attention(
            q, k, v, cu_seqlens=documents_of(q), window=3, softcap=2.0, sinks=sinks
        ),
        eager_attention,
        lambda rows, width: [(rows, 4, width), (rows, 2, width), (rows, 2, width), (4,)],
        widest=256,
    ),
    "attention_narrow_values": Operation(
        lambda q, k, v, sinks: attention(
            q, k, v, cu_seqlens=documents_of(q), window=3, softcap=2.0, sinks=sinks
        ),
        eager_attention,
        lambda rows, width: [(rows, 4, width), (rows, 2, width), (rows, 2, (width + 1) // 2), (4,)],
        widest=512,
    ),
    "route": Operation(
        lambda x: route(x, min(2, x.shape[1]))[0], eager_route, lambda rows, width: [(rows, width)]
    ),
}
