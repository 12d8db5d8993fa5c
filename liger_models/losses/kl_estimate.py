"""Estimates of KL(p || q) from single samples of p, by token: with log ratio d = log p - log q,

    k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

(Schulman, 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html). k1 and k3 have the right
mean, k3 with less variance. As a term of a loss only k2's gradient, d grad log p, has KL's gradient as its
mean; that of k1 has zero, and that of k3 the gradient of KL(q || p) (Tang and Munos, 2025, arXiv:2506.09477;
Liu et al., 2025, arXiv:2510.01555). "k1+" and "k3+" have the value of k1 and k3, and the gradient of k2.

Multiplied by the ratio w = p / p_old of samples drawn from p_old, k1 and k3 have the right mean and gradient,
for any p_old (DeepSeek-V3.2, 2025, arXiv:2512.02556, eq. 7).
"""

from __future__ import annotations

from torch import Tensor

from liger_models.losses.rows import check_tokens

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token, [N, seq]; gradients are those of the formulas above.

    log_probs and reference [N, seq]: of tokens that the policy sampled; the reference has no gradient.

    Raises:
        ValueError: an unknown estimator, or incompatible shapes.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}; expected one of {', '.join(ESTIMATORS)}")
    check_tokens(log_probs, reference=reference)
    d = log_probs - reference.detach()
    k2 = 0.5 * d.square()
    value = {"1": lambda: d, "2": lambda: k2, "3": lambda: (-d).exp() + d - 1}[estimator[1]]()
    return value.detach() + (k2 - k2.detach()) if estimator.endswith("+") else value
