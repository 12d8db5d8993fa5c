"""Mixture of experts: routing, and the experts' products."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from benchmarks.operations.core import Cost, liger, normal, operation, standard_case, true_results, wide
from liger_models import kernels


@operation(
    "route_grouped",
    "tokens x experts x top k x groups x best groups",
    ((32768, 256, 8, 8, 4),),  # DeepSeek-V3
    tiny=(64, 16, 2, 4, 2),
)
def _route_grouped(shape, dtype, device):
    """Sigmoid scores and a bias; the best groups by their two best experts, and of those the best k."""
    tokens, num_experts, top_k, num_groups, top_groups = shape
    logits, bias = (
        normal((tokens, num_experts), torch.float32, device),
        torch.zeros(num_experts, device=device),
    )
    options = {"score": "sigmoid", "num_groups": num_groups, "top_groups": top_groups}

    def eager(logits):
        scores = logits.sigmoid()
        choice = (scores + bias).detach()
        grouped = choice.unflatten(1, (num_groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(top_groups).indices
        keep = torch.zeros(tokens, num_groups, device=device).scatter_(1, best, 1)
        keep = keep.repeat_interleave(num_experts // num_groups, 1).bool()
        weights = scores.gather(1, choice.masked_fill(~keep, -torch.inf).topk(top_k).indices)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)

    chosen_bytes = 8 * tokens * top_k
    return standard_case(
        (logits,),
        (normal((tokens, top_k), torch.float32, device),),
        ours=lambda logits: kernels.route(logits, top_k, correction_bias=bias, **options)[0],
        liger=None,
        eager=eager,
        forward=Cost(logits.nbytes + chosen_bytes),
        training=Cost(3 * logits.nbytes + 2 * chosen_bytes),
    )


@operation(
    "route",
    "tokens x experts x top k",
    ((32768, 128, 8),),  # Qwen3-30B-A3B
    tiny=(64, 16, 2),
    small=(512, 128, 8),
)
def _route(shape, dtype, device):
    """Softmax over all experts, the best k of them, their weights divided by their sum."""
    tokens, num_experts, top_k = shape
    # No two of a row are equal, so that there is one right choice.
    levels = torch.linspace(-3, 3, num_experts, device=device).to(dtype)
    logits = levels[torch.rand(tokens, num_experts, device=device).argsort(1)]

    def eager(logits):
        weights = wide(logits).softmax(-1).topk(top_k).values
        return weights / weights.sum(-1, keepdim=True)

    chosen_bytes = 8 * tokens * top_k  # float32 weights, or their gradients, and int32 experts
    return standard_case(
        (logits,),
        (normal((tokens, top_k), torch.float32, device),),
        ours=lambda logits: kernels.route(logits, top_k)[0],
        liger=None,
        eager=eager,
        # Forward: reads logits, writes the choice. Backward: reads both, writes a gradient.
        forward=Cost(logits.nbytes + chosen_bytes),
        training=Cost(3 * logits.nbytes + 2 * chosen_bytes),
    )


@operation(
    "moe_experts_biased",
    "tokens x hidden x intermediate x experts x top k",
    ((16384, 2880, 2880, 32, 4),),  # gpt-oss 20B
    tiny=(64, 32, 16, 4, 2),
    biased=True,
)
@operation(
    "moe_experts_with_paths",
    "tokens x hidden x intermediate x experts x top k x rank",
    ((16384, 2048, 768, 128, 8, 16),),  # LoRA on Qwen3-30B-A3B
    tiny=(64, 32, 16, 4, 2, 4),
)
@operation(
    "moe_experts_without_gates",
    "tokens x hidden x intermediate x experts x top k",
    ((32768, 2688, 1856, 128, 6),),  # Nemotron 3 Nano 30B-A3B
    tiny=(64, 32, 16, 4, 2),
    gated=False,
)
@operation(
    "moe_experts",
    "tokens x hidden x intermediate x experts x top k",
    ((32768, 2048, 768, 128, 8),),  # Qwen3-30B-A3B
    tiny=(64, 32, 16, 4, 2),
)
def _moe_experts(shape, dtype, device, biased=False, gated=True):
    """The experts' products and their weighted sum, for given routing; with biases, as in gpt-oss; without
    gates, as in Nemotron 3; with low-rank paths of frozen matrices, which eager folds as PEFT does.
    """
    tokens, hidden, intermediate, num_experts, top_k, *ranks = shape
    experts = torch.rand(tokens, num_experts, device=device).topk(top_k).indices
    x, dy = normal((tokens, hidden), dtype, device), normal((tokens, hidden), dtype, device)
    weights = torch.rand(tokens, top_k, device=device)
    parts = 2 if gated else 1
    gate_up = normal((num_experts, parts * intermediate, hidden), dtype, device, hidden**-0.5)
    down = normal((num_experts, hidden, intermediate), dtype, device, intermediate**-0.5)
    widths = (2 * intermediate, hidden) if biased else ()
    leaves = x, weights, gate_up, down, *(normal((num_experts, width), dtype, device) for width in widths)

    for rank in ranks:
        ab = [
            normal(size, dtype, device, 0.02)
            for matrices in (gate_up, down)
            for size in ((num_experts * rank, matrices.shape[2]), (matrices.shape[1], rank * num_experts))
        ]
        leaves = x, weights, *ab

    def fold(matrices, a, b):
        a, b = a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        return torch.baddbmm(matrices.to(a.dtype), b, a, alpha=2.0)

    def folding(function):
        if not ranks:
            return function
        return lambda x, w, *ab: function(x, w, fold(gate_up, *ab[:2]), fold(down, *ab[2:]))

    def ours(x, w, *rest):
        if not ranks:
            return kernels.moe_experts(x, w, experts, *rest[:2], activation, *rest[2:])
        paths = [kernels.ExpertPath(*rest[:2], 2.0)], [kernels.ExpertPath(*rest[2:], 2.0)]
        return kernels.moe_experts(
            x, w, experts, gate_up, down, activation, gate_up_paths=paths[0], down_paths=paths[1]
        )

    def product(h):
        if not gated:
            return h.relu().square()
        gate, up = h.chunk(2, -1)
        if not biased:
            return F.silu(gate) * up
        gate = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))

    def plain(x, weights, *matrices):  # for float64, which torch's grouped product does not take
        y = torch.zeros_like(x)
        # unbind, since the gradient of gate_up[e] is a tensor as large as gate_up
        for e, (first, second, *biases) in enumerate(zip(*(m.unbind() for m in matrices), strict=True)):
            token, slot = torch.where(experts == e)
            h = F.linear(x[token], first, *biases[:1])
            rows = F.linear(product(h), second, *biases[1:])
            y = y.index_add(0, token, weights[token, slot, None] * rows)
        return y

    def grouped(x, weights, gate_up, down, *biases):
        """As in transformers: rows sorted by expert, and torch's grouped product."""
        order = experts.flatten().argsort()
        counts = torch.histc(experts.flatten().float(), num_experts, 0, num_experts - 1)
        ends = counts.cumsum(0).int()
        of_rows = [bias[experts.flatten()[order]] for bias in biases]
        h = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
        h = h + of_rows[0] if biased else h
        rows = torch._grouped_mm(product(h), down.transpose(1, 2), offs=ends)
        rows = rows + of_rows[1] if biased else rows
        rows = (rows * weights.flatten()[order, None]).to(x.dtype)
        return rows[order.argsort()].view(tokens, top_k, hidden).sum(1)

    chosen, activation = experts.int(), kernels.ClampedSwiGLU() if biased else "silu" if gated else "relu2"
    theirs = liger(
        "LigerFusedMoEFunction",
        lambda apply, x, w, gate_up, down: apply(x, gate_up, down, chosen, w),
        note=f"LIGER_FUSED_MOE_AUTOTUNE={os.environ.get('LIGER_FUSED_MOE_AUTOTUNE', '0')}",
    )
    return standard_case(
        leaves,
        (dy,),
        ours=ours,
        liger=theirs if gated and not biased and not ranks else None,
        eager=folding(grouped),
        # Three products by each matrix, or two if it is frozen.
        training=Cost(flops=(4 if ranks else 6) * (parts + 1) * tokens * top_k * intermediate * hidden),
        truth=lambda: true_results(folding(plain), leaves, (dy,)),
    )
