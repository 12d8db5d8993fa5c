"""Routing in a mixture of experts: choose each token's experts and their weights.

    softmax (Shazeer et al., 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088):
        p = softmax(logits),  choose the k largest p,  weights = p / sum of the chosen p, or p itself
    softmax after top-k (Granite, gpt-oss):
        choose the k largest logits,  weights = softmax(chosen logits)
    sigmoid (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; GLM-4.5):
        s = sigmoid(logits),  choose by s + bias,  weights = scale * s / sum of the chosen s
        or choose by logits + bias (Kolibri 1, 2026)
    sqrt_softplus (DeepSeek-V4, 2026): the same with s = sqrt(log(1 + exp(logits)))

With g the gradient of the weights, zero for unchosen experts, and w = s / S, S = sum of chosen s:

    ds = (g - sum g w) / S for the chosen, or g without division by the sum
    dlogits = s (1 - s) ds  for a sigmoid,   s (ds - sum ds s)  for a softmax,   sigmoid(logits) ds / (2 s)

Minimum traffic, for logits of b bytes: the forward reads b E and writes 8 k per token; the backward reads as
much and writes b E. A row of logits stays in registers, and choosing takes k successive maxima; the backward
pass recomputes the scores. More than 1,024 experts, or more than 64 per token, run in plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    as_once_differentiable,
    as_rows,
    at_least_float32,
    ceil_div,
    contiguous_like,
    jit,
    next_power_of_2,
    on_device_of,
    once_differentiable,
    tl,
    use_triton,
)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    softmax_after_top_k: bool = False,
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    correct_logits: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top_2",
    scale: float = 1.0,
    experts: Tensor | None = None,
    renormalize_eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` of E experts for every token, and compute their weights.

    Args:
        logits: [T, E], any floating dtype; scores are computed in float32.
        score: "softmax" over all experts, or "sigmoid" or "sqrt_softplus" of each.
        softmax_after_top_k: choose by the logits, and take the softmax over the chosen ones only.
        renormalize: divide the weights by their sum over the chosen experts.
        correction_bias: [E], added to the scores for the choice only; weights and gradients ignore it.
        correct_logits: add it to the logits instead, and choose by these. Not with groups.
        num_groups, top_groups: consecutive experts form `num_groups` groups of equal size, and experts are
            chosen only from the `top_groups` best.
        group_score: quality of a group, from its (corrected) scores: "top_2", the sum of its two best
            (DeepSeek-V3), or "max", its best (DeepSeek-V2, arXiv:2405.04434, section 2.2.2). With
            "top_2_else_0" experts of the other groups are not left out, but have the corrected score 0, and
            may be chosen before others with negative ones (A.X K2).
        scale: multiplies the weights.
        experts: [T, k] int32, an earlier choice of this function, for which only the weights are computed.
            Recomputation in a backward pass then reproduces the same bits, or at least the same experts if
            the logits differ by a rounding.
        renormalize_eps: added to that sum.

    Returns:
        weights [T, k] in float32 (float64 for float64 logits), and experts [T, k], int32, distinct in a row,
        best first. Among equal experts the kernel takes the first, the plain form torch.topk's. NaN logits
        give NaN weights and experts in range.

    Raises:
        ValueError: incompatible shapes or options, tensors on different devices.
        TypeError: logits that are not floating point.
    """
    groups = num_groups, top_groups, group_score
    _check(logits, top_k, score, softmax_after_top_k, correction_bias, correct_logits, *groups)
    _check_choice(experts, logits, top_k)
    fused = use_triton(logits, correction_bias, experts)
    if fused and logits.shape[1] <= _MOST_EXPERTS and top_k <= _MOST_CHOSEN:
        # Softmax over all, divided by the sum over the chosen, is the softmax of the chosen. They differ if a
        # bias selects experts whose probability underflows in float32.
        plainly = correction_bias is None and top_groups == num_groups and renormalize_eps <= 1e-20
        of_chosen = softmax_after_top_k or (score == "softmax" and renormalize and plainly)
        score, renormalize = ("softmax_of_chosen", False) if of_chosen else (score, renormalize)
        weights, chosen = _Route.apply(
            *(as_rows(logits), correction_bias, experts, top_k, score, renormalize, scale, renormalize_eps),
            (*groups, correct_logits),
        )
        return weights, chosen if experts is None else experts
    plain = route_plain(
        logits,
        top_k,
        score=score,
        softmax_after_top_k=softmax_after_top_k,
        renormalize=renormalize,
        correction_bias=correction_bias,
        correct_logits=correct_logits,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        scale=scale,
        experts=experts,
        renormalize_eps=renormalize_eps,
    )
    return as_once_differentiable(*plain)


def route_plain(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    softmax_after_top_k: bool = False,
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    correct_logits: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top_2",
    scale: float = 1.0,
    experts: Tensor | None = None,
    renormalize_eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Plain twin of `route`."""
    logits = at_least_float32(logits)
    scores = logits.sigmoid() if score == "sigmoid" else logits
    if score == "sqrt_softplus":
        scores = sqrt_softplus(logits)
    if score == "softmax" and not softmax_after_top_k:
        scores = logits.softmax(-1)
    if experts is None:
        with torch.no_grad():
            choice = logits  # same order as scores, without ties from rounding
            if correction_bias is not None or top_groups < num_groups:
                choice = scores if correction_bias is None else scores + correction_bias.to(scores.dtype)
            if correct_logits and correction_bias is not None:
                choice = logits + correction_bias.to(logits.dtype)
            if top_groups < num_groups:
                choice = _best_groups_only(choice, num_groups, top_groups, group_score)
            experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts.long())
    if softmax_after_top_k:
        weights = weights.softmax(-1)
    elif renormalize:
        # Sigmoids may all underflow: then the weights are zero, not nan.
        weights = weights / (weights.sum(-1, keepdim=True) + renormalize_eps)
    return (weights if scale == 1.0 else weights * scale), experts.int()


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) of x [...], float32 or float64: 0 with the gradient 0 where exp(x) underflows."""
    inner = torch.nn.functional.softplus(x)
    there = inner != 0  # also of nan
    return torch.where(there, inner, 1).sqrt() * there


def _best_groups_only(choice: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    grouped = choice.unflatten(-1, (num_groups, -1))  # [T, groups, E / groups]
    quality = grouped.topk(1 if group_score == "max" else 2, dim=-1).values.sum(-1)
    best = torch.zeros_like(quality, dtype=torch.bool)
    best.scatter_(-1, quality.topk(top_groups, dim=-1).indices, True)
    # Corrected scores may be negative: mask the other experts with -inf, unless zero is asked for.
    score = 0.0 if group_score == "top_2_else_0" else -torch.inf
    return grouped.masked_fill(~best.unsqueeze(-1), score).flatten(-2)


def _check(
    logits: Tensor,
    top_k: int,
    score: str,
    softmax_after_top_k: bool,
    correction_bias: Tensor | None,
    correct_logits: bool,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits are {tuple(logits.shape)}; expected [tokens, experts]")
    num_experts = logits.shape[1]
    check_top_k(top_k, num_experts)
    if score not in ("softmax", "sigmoid", "sqrt_softplus"):
        raise ValueError(f"score is {score!r}; expected 'softmax', 'sigmoid' or 'sqrt_softplus'")
    if softmax_after_top_k and score != "softmax":
        raise ValueError("softmax_after_top_k takes the softmax of logits; expected score 'softmax'")
    if correction_bias is not None and correction_bias.shape != (num_experts,):
        raise ValueError(f"correction_bias is {tuple(correction_bias.shape)}; expected ({num_experts},)")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups is {top_groups}; expected 1 to num_groups, {num_groups}")
    if group_score not in ("top_2", "top_2_else_0", "max"):
        raise ValueError(f"group_score is {group_score!r}; expected 'top_2', 'top_2_else_0' or 'max'")
    if correct_logits and (correction_bias is None or top_groups < num_groups):
        raise ValueError("correct_logits is for a choice by a correction_bias, and not from the best groups")
    if top_groups < num_groups:
        size, rest = divmod(num_experts, num_groups)
        least = 1 if group_score == "max" else 2
        if rest or size < least or top_k > top_groups * size:
            expected = f"equal groups of at least {least} experts, with enough experts in the chosen groups"
            raise ValueError(
                f"{num_groups} groups with top_groups={top_groups} do not fit {num_experts} experts and "
                f"{top_k} per token; expected {expected}"
            )


def _check_choice(experts: Tensor | None, logits: Tensor, top_k: int) -> None:
    if experts is None:
        return
    if experts.shape != (len(logits), top_k) or experts.dtype != torch.int32:
        raise ValueError(
            f"experts are {tuple(experts.shape)}, {experts.dtype}; expected ({len(logits)}, {top_k}) int32, "
            "the earlier choice for these tokens"
        )


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise ValueError if a token cannot have `top_k` experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; expected 1 to {num_experts}, the number of experts")


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, correction_bias, given, top_k, score, renormalize, scale, eps, groups):
        # Invalid given experts (duplicates, or out of range) leave places unwritten.
        memory = torch.empty if given is None else torch.zeros
        weights = memory(len(logits), top_k, dtype=torch.float32, device=logits.device)
        experts = torch.empty_like(weights, dtype=torch.int32) if given is None else given.contiguous()
        if correction_bias is not None:
            correction_bias = correction_bias.contiguous()
        ctx.options = score, renormalize, scale, eps
        grouping = dict(
            zip(("NUM_GROUPS", "TOP_GROUPS", "GROUP_SCORE", "CORRECT_LOGITS"), groups, strict=True)
        )
        grouping["GIVEN"] = given is not None
        _launch(_forward_kernel, logits, weights, experts, correction_bias, *ctx.options, **grouping)
        ctx.save_for_backward(logits, experts)
        ctx.set_materialize_grads(False)  # otherwise every backward pass allocates zeros for experts
        if given is not None:
            return weights, None
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights, _):
        if dweights is None:
            return (None,) * 9
        logits, experts = ctx.saved_tensors
        dlogits = contiguous_like(logits)
        _launch(_backward_kernel, logits, dweights.contiguous(), experts, dlogits, *ctx.options)
        return dlogits, *(None,) * 8


def _launch(kernel, logits, weights, experts, extra, score, renormalize, scale, eps, **grouping):
    rows, num_experts = logits.shape
    if not rows:
        return
    lanes = next_power_of_2(num_experts)
    rows_a_program = _ELEMENTS // lanes
    with on_device_of(logits):
        kernel[(ceil_div(rows, rows_a_program),)](
            logits,
            weights,
            experts,
            extra,
            logits.stride(0),
            rows,
            num_experts,
            scale,
            eps,
            SCORE=score,
            RENORMALIZE=renormalize,
            TOP_K=experts.shape[1],
            ROWS=rows_a_program,
            LANES=lanes,
            **grouping,
            num_warps=4,
        )


_ELEMENTS = 1024  # per tile: 8 for each of 128 threads
_MOST_EXPERTS = _ELEMENTS
_MOST_CHOSEN = 64  # the backward pass is unrolled over them: 2 s to compile, but 49 for 256


@jit
def _load_tile(logits, stride, rows, num_experts, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Row indices [ROWS, 1], experts [1, LANES], and logits in float32, -inf past the last expert."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.arange(0, LANES)[None, :]
    x = tl.load(logits + row * stride + expert, (row < rows) & (expert < num_experts), 0.0)
    return row, expert, tl.where(expert < num_experts, x.to(tl.float32), -float("inf"))


@jit
def _scores(x, SCORE: tl.constexpr):
    if SCORE == "sigmoid":
        return tl.div_rn(1.0, 1.0 + tl.exp(-x))
    elif SCORE == "sqrt_softplus":
        # log(1 + e) of a small e by e log(w) / (w - 1), w = 1 + e as rounded (Kahan), which loses no digits.
        e = tl.exp(-tl.abs(x))
        w = 1.0 + e
        log1p = tl.where(w == 1.0, e, e * tl.div_rn(tl.log(w), tl.where(w == 1.0, 1.0, w - 1.0)))
        return tl.sqrt_rn(tl.where(x > 0, x, 0.0) + log1p)
    else:
        e = tl.exp(x - tl.max(x, 1)[:, None])
        return tl.div_rn(e, tl.sum(e, 1)[:, None])


@jit
def _sort_key(x):
    """Integers in the order of x, above the least integer; zeros compare equal, and nan is largest."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(x == 0.0, 0, key))


@jit
def _group_quality(
    choice,
    expert,
    group,
    NUM_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Score of each expert's group; nan if the group contains a nan."""
    quality = choice
    for g in range(NUM_GROUPS):
        mine = group == g
        inside = tl.where(mine, choice, -float("inf"))
        best = tl.max(inside, 1)[:, None]
        if GROUP_SCORE != "max":
            first = tl.min(tl.where(mine & (inside == best), expert, LANES), 1)[:, None]
            best += tl.max(tl.where(expert == first, -float("inf"), inside), 1)[:, None]
        broken = tl.max((inside != inside).to(tl.int32), 1)[:, None] == 1
        quality = tl.where(mine, tl.where(broken, float("nan"), best), quality)
    return quality


@jit
def _ranks(
    x,
    scores,
    expert,
    correction_bias,
    num_experts,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    CORRECT_LOGITS: tl.constexpr,
):
    """Rank of each expert among the chosen, best first; TOP_K for the others."""
    TAKEN: tl.constexpr = -(1 << 31)
    choice = x  # same order as scores, without ties from rounding
    if correction_bias is not None:
        corrected = x if CORRECT_LOGITS else scores
        choice = corrected + tl.load(correction_bias + expert, expert < num_experts, 0.0).to(tl.float32)
    if TOP_GROUPS < NUM_GROUPS:
        choice = scores if correction_bias is None else choice  # logits + bias would have another order
        group = expert // (num_experts // NUM_GROUPS)
        quality = _group_quality(choice, expert, group, NUM_GROUPS, GROUP_SCORE, LANES)
        group_key = tl.where(expert < num_experts, _sort_key(quality), TAKEN)
        kept = tl.zeros((ROWS, LANES), tl.int32)
        for _ in range(TOP_GROUPS):
            largest = tl.max(group_key, 1)[:, None]
            first = tl.min(tl.where(group_key == largest, group, NUM_GROUPS), 1)[:, None]
            group_key = tl.where(group == first, TAKEN, group_key)
            kept = tl.where(group == first, 1, kept)
        # Corrected scores may be negative: mask the other experts with -inf, unless zero is asked for.
        choice = tl.where(kept == 1, choice, 0.0 if GROUP_SCORE == "top_2_else_0" else -float("inf"))
    key = tl.where(expert < num_experts, _sort_key(choice), TAKEN)
    rank = tl.full((ROWS, LANES), TOP_K, tl.int32)
    for slot in range(TOP_K):
        # Two integer reductions: from 128 experts on, a warp does each in one instruction.
        largest = tl.max(key, 1)[:, None]
        best = expert == tl.min(tl.where(key == largest, expert, LANES), 1)[:, None]  # first among equals
        key = tl.where(best, TAKEN, key)
        rank = tl.where(best, slot, rank)
    return rank


@jit
def _forward_kernel(
    logits,
    weights,
    experts,
    correction_bias,
    stride,
    rows,
    num_experts,
    scale,
    eps,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    CORRECT_LOGITS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    row, expert, x = _load_tile(logits, stride, rows, num_experts, ROWS, LANES)
    scores = x
    if SCORE != "softmax_of_chosen":
        scores = _scores(x, SCORE)
    if GIVEN:
        rank = tl.full((ROWS, LANES), TOP_K, tl.int32)
        for slot in tl.static_range(TOP_K):  # unrolled, so that loads overlap
            rank = tl.where(expert == tl.load(experts + row * TOP_K + slot, row < rows, 0), slot, rank)
    else:
        rank = _ranks(
            x,
            scores,
            expert,
            correction_bias,
            num_experts,
            TOP_K,
            ROWS,
            LANES,
            NUM_GROUPS,
            TOP_GROUPS,
            GROUP_SCORE,
            CORRECT_LOGITS,
        )
    chosen = rank < TOP_K
    if SCORE == "softmax_of_chosen":
        scores = _scores(tl.where(chosen, x, -float("inf")), SCORE)
    if RENORMALIZE:
        scores = tl.div_rn(scores, tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None] + eps)
    mine = chosen & (row < rows)
    tl.store(weights + row * TOP_K + rank, scores * scale, mine)
    if not GIVEN:
        tl.store(experts + row * TOP_K + rank, tl.broadcast_to(expert, (ROWS, LANES)), mine)


@jit
def _backward_kernel(
    logits,
    dweights,
    experts,
    dlogits,
    stride,
    rows,
    num_experts,
    scale,
    eps,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    row, expert, x = _load_tile(logits, stride, rows, num_experts, ROWS, LANES)
    chosen = tl.zeros((ROWS, LANES), tl.int1)
    grad = tl.zeros((ROWS, LANES), tl.float32)
    for slot in tl.static_range(TOP_K):  # unrolled, so that loads overlap
        mine = expert == tl.load(experts + row * TOP_K + slot, row < rows, 0)
        chosen = chosen | mine
        grad = tl.where(mine, scale * tl.load(dweights + row * TOP_K + slot, row < rows, 0.0), grad)
    if SCORE == "softmax_of_chosen":
        x = tl.where(chosen, x, -float("inf"))
    scores = _scores(x, SCORE)
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), 1)[:, None] + eps
        mean = tl.div_rn(tl.sum(grad * scores, 1)[:, None], total)
        grad = tl.where(chosen, tl.div_rn(grad - mean, total), 0.0)
    if SCORE == "sigmoid":
        dx = grad * scores * _scores(-x, SCORE)  # scores * (1 - scores) without cancellation
    elif SCORE == "sqrt_softplus":
        root = tl.where(scores == 0, 1.0, scores)
        dx = tl.where(scores == 0, 0.0, tl.div_rn(grad * _scores(x, "sigmoid"), 2 * root))
    else:
        dx = scores * (grad - tl.sum(grad * scores, 1)[:, None])
    dx = dx.to(dlogits.dtype.element_ty)
    tl.store(dlogits + row * num_experts + expert, dx, (row < rows) & (expert < num_experts))
