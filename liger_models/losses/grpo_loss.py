"""Policy gradients on groups of sampled answers: GRPO and its variants.

With advantages A and ratios w = p / p_old, per token or, per sequence, normalised by length (GSPO: Zheng et
al.,
2025, arXiv:2507.18071), GRPO (Shao et al., 2024, arXiv:2402.03300, eq. 3) is

    loss = mean of  - min(w A, clip(w, 1 - low, 1 + high) A) + beta KL,   KL = q/p - log(q/p) - 1

with q the reference's probability (or another estimate: kl_estimate.py). The type determines the first term,
and the set that the mean is over:

    grpo       tokens of a sequence, then sequences
    bnpo       all tokens of this call
    dr_grpo    sequences times a constant length (Liu et al., 2025, arXiv:2503.20783)
    dapo       all tokens of the step (Yu et al., 2025, arXiv:2503.14476)
    luspo      sequences, of sums over tokens (2026, arXiv:2602.05261)
    cispo      as dapo, with - min(w, high) A log p, w constant (MiniMax-M1, 2025, arXiv:2506.13585)
    sapo       as grpo, with - 4/t S(t (w - 1)) A, t by the sign of A (2025, arXiv:2511.20347)
    gmpo       sequences, with - exp(mean over tokens of c) A, c = log w clipped to [-low, high] from above
               where A > 0, from below elsewhere (Zhao et al., 2025, arXiv:2507.20673)
    vespo      as dapo, with - phi(W) A log p, phi(W) = W^k exp(lambda (1 - W)) constant, W the sequence's
               ratio (2026, arXiv:2602.10693)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.losses.kl_estimate import kl_estimate
from liger_models.losses.rows import check_tokens

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "gmpo", "vespo")
_BY_TOKENS_OF_STEP = ("dapo", "cispo", "vespo")


class PolicyLoss(NamedTuple):
    """The differentiable scalar loss; and, without gradient, the tokens' mean KL term (None without a
    reference) and the fraction of clipped tokens.
    """

    loss: Tensor
    kl: Tensor | None
    clipped: Tensor


@dataclass(frozen=True)
class PolicyOptions:
    """Type of the loss, and limits on the policy's change.

    Attributes:
        loss_type: one of `TYPES`.
        level: "token" or "sequence" ratios.
        low, high: clipping bounds, 1 - low and 1 + high; high defaults to low. "cispo" requires high, the
            largest ratio itself, such as 5: 1 or more. "gmpo" bounds log ratios (its paper: 0.4 for both).
        delta: the largest ratio for negative A, above 1 + high (two-sided clipping: INTELLECT-2, 2025,
            arXiv:2505.07291).
        beta: weight of the KL term.
        kl: the estimate in the KL term, "k2", "k3", "k1+" or "k3+"; with unbiased_kl also "k1"
            (kl_estimate.py). GRPO's is k3.
        unbiased_kl: multiply a token's KL term by its ratio, for k1 and k3 (DeepSeek-V3.2, 2025,
            arXiv:2512.02556).
        length: for "dr_grpo": the constant, such as the maximum length of sampled answers.
        temperatures: for "sapo", of positive advantages and of others.
        vespo: k and lambda of "vespo", for non-negative advantages, and then for negative ones.
    """

    loss_type: str = "dapo"
    level: str = "token"
    low: float = 0.2
    high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    unbiased_kl: bool = False
    length: int | None = None
    temperatures: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: an unknown name, or incompatible options.
        """
        if self.loss_type not in TYPES:
            raise ValueError(f"unknown loss_type {self.loss_type!r}; choose from {', '.join(TYPES)}")
        if self.level not in ("token", "sequence"):
            raise ValueError(f"level is {self.level!r}; expected 'token' or 'sequence'")
        if self.loss_type in ("gmpo", "vespo") and self.level != "token":
            raise ValueError(f"{self.loss_type} computes sequence ratios itself: leave level at 'token'")
        if self.loss_type == "gmpo" and (self.delta is not None or self.unbiased_kl):
            raise ValueError(
                f"delta is {self.delta} and unbiased_kl {self.unbiased_kl}; gmpo, which has one ratio per "
                "sequence, takes neither"
            )
        good = ("k1", "k3") if self.unbiased_kl else ("k2", "k3", "k1+", "k3+")
        if self.kl not in good:
            form = "times the ratio" if self.unbiased_kl else "as a loss"
            raise ValueError(f"kl is {self.kl!r}; expected {', '.join(good)}, the estimates to use {form}")
        if self.loss_type == "cispo" and not (self.high is not None and self.high >= 1):
            raise ValueError(f"high is {self.high}; for cispo it is the largest ratio: expected 1 or more")
        if (self.loss_type == "dr_grpo") is (self.length is None):
            raise ValueError(
                f"loss_type={self.loss_type!r}, length={self.length}: only dr_grpo takes a length"
            )
        if self.delta is not None and self.delta <= 1 + self.upper:
            raise ValueError(f"delta is {self.delta}; expected more than 1 + high = {1 + self.upper}")

    @property
    def upper(self) -> float:
        return self.low if self.high is None else self.high


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    counted: Tensor,
    options: PolicyOptions = PolicyOptions(),
    *,
    old_log_probs: Tensor | None = None,
    reference: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    kept: Tensor | None = None,
    num_items: Tensor | int | float | None = None,
) -> PolicyLoss:
    """Loss of N sampled answers.

    Args:
        log_probs: of the answers' tokens, [N, seq], from `model.score`.
        advantages: [N], or [N, seq] for one per token.
        counted: which positions belong to an answer, [N, seq].
        options: type and settings.
        old_log_probs: [N, seq] of the policy that sampled. Default: log_probs, so that ratios are one.
        reference: [N, seq], of the reference model, for the KL term.
        sampler_ratio: [N, seq] or [N, 1], from `sampler_ratio`: a factor of the first term.
        kept: [N, seq] or [N, 1]: restricts the first term, for example to `top_entropy` or `on_policy`; the
            means keep their divisor, except gmpo's over tokens.
        num_items: the divisor of the mean: tokens for "dapo", "cispo", "vespo" and "bnpo", else sequences, of
            the whole step on all ranks, divided by the number of ranks. Default: those of this call.

    Raises:
        ValueError: beta without a reference, or incompatible shapes.
    """
    check_tokens(
        log_probs,
        advantages=advantages,
        counted=counted,
        old_log_probs=old_log_probs,
        reference=reference,
        sampler_ratio=sampler_ratio,
        kept=kept,
    )
    if options.beta and reference is None:
        raise ValueError(f"beta is {options.beta}: the KL term needs the reference's log-probabilities")
    counted = counted.to(log_probs.dtype)
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    old = log_probs.detach() if old_log_probs is None else old_log_probs.detach()
    log_ratio = log_probs - old
    if options.loss_type == "gmpo":
        _check_gmpo(advantages, sampler_ratio)
        kept, ratio = _geometric_mean(log_ratio, advantages, counted, kept, options)
    elif options.level == "sequence":
        by_token = (log_ratio * counted).sum(1) / counted.sum(1).clamp(min=1)
        ratio = by_token.exp().unsqueeze(1)
    else:
        ratio = log_ratio.exp()

    losses = _first_term(log_probs, log_ratio, ratio, advantages, counted, options, sampler_ratio)
    if kept is not None:
        losses = losses * kept
    if sampler_ratio is not None and options.loss_type != "vespo":
        losses = losses * sampler_ratio
    kl = None
    if reference is not None:
        kl = kl_estimate(log_probs, reference, options.kl)
        kl = kl * ratio if options.unbiased_kl else kl
        if options.beta:
            losses = losses + options.beta * kl
        kl = (kl.detach() * counted).sum() / counted.sum().clamp(min=1)
    with torch.no_grad():
        clipped = (_is_clipped(log_ratio, ratio, advantages, options) * counted).sum() / counted.sum().clamp(
            min=1
        )
    return PolicyLoss(_mean(losses * counted, counted, options, num_items), kl, clipped)


def _check_gmpo(advantages: Tensor, sampler_ratio: Tensor | None) -> None:
    for name, value in (("advantages", advantages), ("sampler_ratio", sampler_ratio)):
        if value is not None and value.shape[1] != 1:
            raise ValueError(
                f"found {name} {list(value.shape)}; gmpo weights whole sequences: expected one per sequence"
            )


def _geometric_mean(log_ratio, advantages, counted, kept, options) -> tuple[Tensor | None, Tensor]:
    """GMPO: whether a sequence has a kept token, and the geometric mean of its clipped ratios, [N, 1]."""
    bounded = log_ratio.clamp(-options.low, options.upper)
    bounded = torch.where(advantages > 0, log_ratio.minimum(bounded), log_ratio.maximum(bounded))
    within = counted if kept is None else counted * kept
    count = within.sum(1, keepdim=True)
    kept = None if kept is None else count > 0
    return kept, ((bounded * within).sum(1, keepdim=True) / count.clamp(min=1)).exp()


def _first_term(log_probs, log_ratio, ratio, advantages, counted, options, sampler_ratio) -> Tensor:
    """A type's counterpart of - min(w A, clip(w) A): [N, seq], or [N, 1]."""
    if options.loss_type == "cispo":
        return -ratio.clamp(max=options.upper).detach() * advantages * log_probs
    if options.loss_type == "gmpo":
        return -ratio * advantages
    if options.loss_type == "sapo":
        positive, other = options.temperatures
        t = torch.where(advantages > 0, positive, other)
        return -(t * (ratio - 1)).sigmoid() * (4 / t) * advantages
    if options.loss_type == "vespo":
        phi = _vespo_weight(log_ratio, advantages, counted, options, sampler_ratio)
        return -phi * advantages * log_probs
    bounded = ratio.clamp(1 - options.low, 1 + options.upper)
    ratio = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.minimum(ratio * advantages, bounded * advantages)


@torch.no_grad()
def _vespo_weight(log_ratio, advantages, counted, options, sampler_ratio) -> Tensor:
    """phi(W), [N, 1], with W, including the sampler ratio, between 1e-8 and e^20."""
    lowest = math.log(1e-8)
    log_w = (log_ratio.clamp(-20, 20) * counted).sum(1, keepdim=True)
    if sampler_ratio is not None:
        log_w = log_w + sampler_ratio.log().clamp(lowest, 20).sum(1, keepdim=True)
    log_w = log_w.clamp(lowest, 20)
    k, scale, k_below, scale_below = options.vespo
    at_least_zero = advantages >= 0
    k = torch.where(at_least_zero, k, k_below)
    scale = torch.where(at_least_zero, scale, scale_below).clamp(min=1e-4)
    return (scale + k * log_w - scale * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


def _is_clipped(log_ratio, ratio, advantages, options) -> Tensor:
    if options.loss_type == "gmpo":
        above, below = log_ratio > options.upper, log_ratio < -options.low
        return (above & (advantages > 0)) | (below & (advantages < 0))
    if options.loss_type in ("sapo", "vespo"):
        return torch.zeros_like(ratio)
    if options.loss_type == "cispo":
        return (ratio > options.upper) & (advantages > 0)
    above, below = ratio > 1 + options.upper, ratio < 1 - options.low
    return (above & (advantages > 0)) | (below & (advantages < 0))


def _mean(losses: Tensor, counted: Tensor, options: PolicyOptions, num_items) -> Tensor:
    """Mean of losses [N, seq], zero where not counted, over the type's divisor."""
    if options.loss_type in (*_BY_TOKENS_OF_STEP, "bnpo"):
        return losses.sum() / (counted.sum().clamp(min=1) if num_items is None else num_items)
    sums = losses.sum(1)
    if options.loss_type in ("grpo", "sapo", "gmpo"):
        sums = sums / counted.sum(1).clamp(min=1)
    elif options.loss_type == "dr_grpo":
        assert options.length is not None
        sums = sums / options.length
    return sums.sum() / (len(sums) if num_items is None else num_items)
