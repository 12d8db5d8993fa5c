"""Preference optimisation against a reference model: DPO and its variants.

For a pair with sequence log-probabilities log p(chosen), log p(rejected) under the policy and under the
reference, let r be their differences (log-ratios), s = f'(exp r) for an f-divergence (reverse KL: s = r), d =
s_chosen - s_rejected and S the logistic function. DPO (Rafailov et al., 2023, arXiv:2305.18290) is

    loss = - log S(beta d)

The other types are defined below with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_models.losses.rows import check_sequences, mean_of


class PreferenceLoss(NamedTuple):
    """The differentiable scalar loss, and beta times each sequence's log-ratio [N], without gradient."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margin(self) -> Tensor:
        """Mean difference of the rewards."""
        return (self.chosen_rewards - self.rejected_rewards).mean()

    @property
    def accuracy(self) -> Tensor:
        """Fraction of pairs whose chosen sequence has the larger reward."""
        return (self.chosen_rewards > self.rejected_rewards).float().mean()


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    loss_type: str | Mapping[str, float] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    nll: Tensor | None = None,
    weights: Tensor | None = None,
    num_items: Tensor | int | float | None = None,
) -> PreferenceLoss:
    """Mean loss of N pairs, over these pairs or over `num_items` (see losses/rows.py). Two types, `aot` and
    `aot_unpaired`, sort all pairs of a call, so that losses of parts do not add up to the whole.

    Args:
        chosen, rejected, reference_chosen, reference_rejected: log-probabilities of the sequences, [N], from
            `sequence_log_probs`, all four with the same `desensitized`; the reference's have no gradient.
        loss_type: a name of `TYPES`, or a mapping from names to the weights of a sum (MPO: Wang et al., 2024,
            arXiv:2411.10442).
        beta: strength of the KL regularisation towards the reference.
        label_smoothing: the probability that a pair's labels are swapped, for `robust`, `exo_pair`, `aot` and
            `aot_unpaired`.
        f_divergence: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", with `f_alpha` (Wang
            et al., 2023, arXiv:2309.16240).
        discopop_tau: the temperature of `discopop`.
        chosen_lengths, rejected_lengths: labels of each sequence, [N], for `ipo` and `sigmoid_norm`.
        nll: for `sft`, the chosen sequences' negative log-likelihood, a scalar, a mean over tokens.
        weights: of the pairs, [N], such as those of `wpo_weights`.

    Raises:
        ValueError: an unknown name, incompatible options, or incompatible shapes.
    """
    types = {loss_type: 1.0} if isinstance(loss_type, str) else dict(loss_type)
    check_sequences(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        weights=weights,
    )
    _check(types, f_divergence, label_smoothing, chosen_lengths, rejected_lengths, nll, weights)
    ratios = chosen - reference_chosen.detach(), rejected - reference_rejected.detach()
    scores = [_slope_of_divergence(ratio, f_divergence, f_alpha) for ratio in ratios]
    reference_margin = (reference_chosen - reference_rejected).detach()
    pairs = _Pairs(
        ratios[0],
        ratios[1],
        scores[0],
        scores[1],
        chosen - rejected,
        reference_margin,
        chosen_lengths,
        rejected_lengths,
        beta,
        label_smoothing,
        discopop_tau,
    )
    losses = sum(weight * TYPES[name](pairs) for name, weight in types.items())
    assert isinstance(losses, Tensor)
    loss = mean_of(losses if weights is None else losses * weights, num_items)
    loss = loss if nll is None else loss + types["sft"] * nll
    return PreferenceLoss(loss, *(beta * ratio.detach() for ratio in ratios))


class _Pairs(NamedTuple):
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    margin: Tensor
    reference_margin: Tensor
    chosen_lengths: Tensor | None
    rejected_lengths: Tensor | None
    beta: float
    smoothing: float
    tau: float

    @property
    def logits(self) -> Tensor:
        return self.beta * (self.chosen_score - self.rejected_score)

    @property
    def mean_difference(self) -> Tensor:
        """Difference of the scores per token."""
        assert self.chosen_lengths is not None
        assert self.rejected_lengths is not None
        a, b = self.chosen_lengths.clamp(min=1), self.rejected_lengths.clamp(min=1)
        return self.chosen_score / a - self.rejected_score / b


def _slope_of_divergence(ratio: Tensor, f_divergence: str, alpha: float) -> Tensor:
    """f'(t) at t = exp(ratio), up to constants that cancel in a pair's difference."""
    if f_divergence == "forward_kl":
        return 1 - (-ratio).exp()
    if f_divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if f_divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return ((alpha - 1) * ratio).clamp(max=80.0).expm1() / (alpha - 1)  # exp(80) is finite in float32
    return ratio  # reverse KL, and alpha = 1


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _exo_pair(p: _Pairs) -> Tensor:
    """KL(S(beta d) || 1 - smoothing) of two outcomes: Ji et al., 2024, arXiv:2402.00856, eq. 16."""
    won = p.logits.sigmoid() * (logsigmoid(p.logits) - math.log1p(-p.smoothing))
    return won + (-p.logits).sigmoid() * (logsigmoid(-p.logits) - math.log(p.smoothing))


def _nca_pair(p: _Pairs) -> Tensor:
    """Chen et al., 2024, arXiv:2402.05369, for two answers."""
    a, b = p.beta * p.chosen_ratio, p.beta * p.rejected_ratio
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


def _robust(p: _Pairs) -> Tensor:
    """Chowdhury et al., 2024, arXiv:2403.00409: unbiased for labels with this error rate."""
    flipped = p.smoothing * logsigmoid(-p.logits)
    return (flipped - (1 - p.smoothing) * logsigmoid(p.logits)) / (1 - 2 * p.smoothing)


def _bco_pair(p: _Pairs) -> Tensor:
    """Jung et al., 2024, arXiv:2404.04656, without the shift of the rewards."""
    return -logsigmoid(p.beta * p.chosen_ratio) - logsigmoid(-p.beta * p.rejected_ratio)


def _sppo_hard(p: _Pairs) -> Tensor:
    """Wu et al., 2024, arXiv:2405.00675, eq. 4.7, with a winner that always wins."""
    half = 0.5 / p.beta
    return (p.chosen_ratio - half) ** 2 + (p.rejected_ratio + half) ** 2


def _aot(p: _Pairs) -> Tensor:
    """Melnyk et al., 2024, arXiv:2406.05882: margins of policy and reference, each sorted."""
    return _smoothed(p.beta * (p.margin.sort().values - p.reference_margin.sort().values), p.smoothing)


def _aot_unpaired(p: _Pairs) -> Tensor:
    """The same for the log-ratios of chosen and of rejected sequences."""
    ordered = p.chosen_ratio.sort().values - p.rejected_ratio.sort().values
    return _smoothed(p.beta * ordered, p.smoothing)


def _apo_zero(p: _Pairs) -> Tensor:
    """D'Oosterlinck et al., 2024, arXiv:2408.06266, eq. 7: for chosen answers above the model's level."""
    return (-p.beta * p.chosen_ratio).sigmoid() + (p.beta * p.rejected_ratio).sigmoid()


def _apo_down(p: _Pairs) -> Tensor:
    """The same paper's eq. 8: for chosen answers below the model's level."""
    worse = (p.beta * (p.rejected_ratio - p.chosen_ratio)).sigmoid()
    return (p.beta * p.chosen_ratio).sigmoid() + worse


def _discopop(p: _Pairs) -> Tensor:
    """Lu et al., 2024, arXiv:2406.08414, eq. 5: between the logistic and the exponential loss."""
    mixed = (p.logits / p.tau).sigmoid()
    return -logsigmoid(p.logits) * (1 - mixed) + (-p.logits).exp() * mixed


TYPES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.logits),
    "hinge": lambda p: torch.relu(1 - p.logits),  # SLiC: Zhao et al., 2023, arXiv:2305.10425
    # Azar et al., 2023, arXiv:2310.12036, eq. 17, per token as in the authors' code.
    "ipo": lambda p: (p.mean_difference - 1 / (2 * p.beta)) ** 2,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": lambda p: torch.zeros_like(p.margin),  # no pair term: nll is added to the mean
    # Length-normalised DPO: Lambert et al., 2024, arXiv:2411.15124
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.mean_difference),
}
_OF_SCORES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}
_OF_LENGTHS = {"ipo", "sigmoid_norm"}
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def _check(types, f_divergence, smoothing, chosen_lengths, rejected_lengths, nll, weights) -> None:
    if unknown := sorted(types.keys() - TYPES.keys()) or not types:
        raise ValueError(f"unknown loss_type {unknown or types}; choose from {', '.join(TYPES)}")
    if f_divergence not in _DIVERGENCES:
        raise ValueError(f"unknown f_divergence {f_divergence!r}; choose from {', '.join(_DIVERGENCES)}")
    if f_divergence != "reverse_kl" and (others := sorted(types.keys() - _OF_SCORES)):
        raise ValueError(f"{', '.join(others)}: defined only for f_divergence='reverse_kl'")
    if types.keys() & _OF_LENGTHS and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError(
            f"{', '.join(types.keys() & _OF_LENGTHS)}: needs chosen_lengths and rejected_lengths"
        )
    if (nll is None) is ("sft" in types):
        raise ValueError(f"loss_type={[*types]}: sft needs nll, other types take none; found nll={nll}")
    if "exo_pair" in types and not 0 < smoothing < 1:
        raise ValueError(f"exo_pair: label_smoothing is {smoothing}; expected above 0, such as 1e-3")
    if smoothing and not types.keys() & _SMOOTHED:
        raise ValueError(f"label_smoothing has no effect here; it applies to {', '.join(sorted(_SMOOTHED))}")
    if not 0 <= smoothing < (0.5 if "robust" in types else 1):
        raise ValueError(f"label_smoothing is {smoothing}; expected 0 to below 1, for robust below 0.5")
    if weights is not None and (others := sorted(types.keys() & {"aot", "aot_unpaired", "sft"})):
        raise ValueError(
            f"{', '.join(others)}: weights are not supported, since aot sorts the batch and sft is a mean "
            "over tokens"
        )


def wpo_weights(log_probs: Tensor, log_sum_sq_probs: Tensor, counted: Tensor) -> Tensor:
    """Weights [N] of pairs by their likelihood under the policy (WPO: Zhou et al., 2024, arXiv:2406.11827,
    eq. 2, aligned by the mean of the sampled distributions).

    All inputs [2 N, seq], rows [chosen, rejected], from `model.score`; counted marks positions with a label.
    """
    aligned = (log_probs - log_sum_sq_probs).detach() * counted
    return (aligned.sum(1) / counted.sum(1).clamp(min=1)).exp().unflatten(0, (2, -1)).prod(0)
