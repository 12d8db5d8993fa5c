"""Agreement of two sets of log-probabilities of the same tokens, such as those of the trained model and those
of the inference engine that sampled them.

With d = log p_ours - log p_engine of each token, and w = exp(d):

    multiplicative error     mean of exp(|d|) = max(w, 1 / w): 1 is perfect agreement (NeMo RL, guide "Add New
                             Models", docs.nvidia.com/nemo/rl)
    KL(engine || ours)       mean of w - 1 - d, Schulman's k3: never negative, and exact in the mean for
                             tokens that the engine sampled
    effective sample share   (sum w)^2 / (n sum w^2), of n tokens weighted by w: 1 is perfect agreement
    clipped                  the share of tokens with w outside [1 - clip, 1 + clip], which a policy gradient
                             would clip, or leave out, before any training
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import float64_device
from liger_models.losses.rows import check_tokens


class Disagreement(NamedTuple):
    """A token on which the two differ: its place, and both log-probabilities."""

    row: int
    position: int
    ours: float
    engine: float


@dataclass(frozen=True)
class Agreement:
    """Report of `agreement`; `str` gives a table.

    Attributes:
        tokens: the number of tokens compared.
        error: the multiplicative error.
        mean, largest: of |d|, in nats.
        kl: estimate of KL(engine || ours), in nats per token.
        effective: the effective sample share.
        clip: the bound of ratios.
        clipped: share of tokens with ratios outside it.
        clipped_sequences: share of sequences whose ratio, normalised by length (GSPO's), is outside it.
        worst: the tokens with the largest |d|, the largest first.
    """

    tokens: int
    error: float
    mean: float
    largest: float
    kl: float
    effective: float
    clip: float
    clipped: float
    clipped_sequences: float
    worst: tuple[Disagreement, ...]

    def __str__(self) -> str:
        bounds = f"outside [{1 - self.clip:g}, {1 + self.clip:g}]"
        lines = [
            f"{'tokens compared':<40} {self.tokens:>12,}",
            f"{'multiplicative error':<40} {self.error:>12.6f}",
            f"{'mean |d|, nats':<40} {self.mean:>12.6f}",
            f"{'largest |d|, nats':<40} {self.largest:>12.6f}",
            f"{'KL(engine || ours), nats per token':<40} {self.kl:>12.3e}",
            f"{'effective sample share':<40} {self.effective:>12.6f}",
            f"{f'tokens with a ratio {bounds}':<40} {self.clipped:>12.4%}",
            f"{f'sequences with one {bounds}':<40} {self.clipped_sequences:>12.4%}",
            "",
            f"{'row':>6} {'position':>9} {'ours':>12} {'engine':>12} {'ratio':>12}",
        ]
        for row, position, ours, engine in self.worst:
            ratio = torch.tensor(ours - engine).exp().item()
            lines.append(f"{row:>6} {position:>9} {ours:>12.5f} {engine:>12.5f} {ratio:>12.5f}")
        return "\n".join(lines)


@torch.no_grad()
def agreement(
    ours: Tensor, engine: Tensor, counted: Tensor, *, clip: float = 0.2, worst: int = 5
) -> Agreement:
    """Compare log-probabilities [N, seq] of the same tokens.

    Args:
        ours: from `model.score`, at the temperature that the engine sampled with.
        engine: the engine's, for the same tokens. nan: not known, not compared.
        counted: which positions are compared, [N, seq].
        clip: bound of ratios, as `low` and `high` of `PolicyOptions`.
        worst: number of tokens to list.

    Raises:
        ValueError: incompatible shapes, no token to compare, or a number of ours or an infinite one of the
            engine's that cannot be compared.
    """
    check_tokens(ours, engine=engine, counted=counted)
    device = float64_device(ours.device)
    ours, engine = ours.to(device, torch.float64), engine.to(device, torch.float64)
    compared = counted.to(ours.device).bool() & ~engine.isnan()
    if not compared.any():
        raise ValueError("found no token to compare: none is counted with a log-probability of the engine")
    if bad := [name for name, x in (("ours", ours), ("engine", engine)) if not x[compared].isfinite().all()]:
        raise ValueError(f"found log-probabilities that are not finite in {' and '.join(bad)}")
    d = torch.where(compared, ours - engine, 0.0)
    each, size = d[compared], d.abs()
    ratios = each.exp()
    lengths = compared.sum(1)
    by_sequence = (d.sum(1) / lengths.clamp(min=1)).exp()[lengths > 0]
    largest = size.masked_fill(~compared, -1.0).flatten().topk(min(worst, len(each))).indices
    rows, positions = largest // d.shape[1], largest % d.shape[1]
    pairs = zip(
        *(x.tolist() for x in (rows, positions, ours[rows, positions], engine[rows, positions])), strict=True
    )
    return Agreement(
        tokens=len(each),
        error=each.abs().exp().mean().item(),
        mean=each.abs().mean().item(),
        largest=size.max().item(),
        kl=(torch.expm1(each) - each).mean().item(),
        effective=(ratios.sum() ** 2 / (len(each) * ratios.square().sum())).item(),
        clip=clip,
        clipped=((ratios - 1).abs() > clip).double().mean().item(),
        clipped_sequences=((by_sequence - 1).abs() > clip).double().mean().item(),
        worst=tuple(Disagreement(*pair) for pair in pairs),
    )
