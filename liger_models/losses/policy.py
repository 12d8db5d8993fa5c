"""What a policy gradient weighs its tokens with: advantages from rewards, ratios between the engine that
sampled and the model that is trained, and which tokens count.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.losses.rows import check_tokens


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group") -> Tensor:
    """Rewards [N] of answers, group after group, less their group's mean (GRPO: arXiv:2402.03300, sec. 4.1).

    scale: divided by the standard deviation of the "group", or of the "batch" (arXiv:2508.08221), each plus
    1e-4, or by nothing: "none" (Dr. GRPO: arXiv:2503.20783). All of a step's rewards belong in one call,
    those of other ranks included. nan stands for no reward: the others of the group count, and its advantage
    is zero.

    Raises:
        ValueError: rewards that do not fill groups, or an unknown scale.
    """
    groups = _groups(rewards, group_size)
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group', 'batch' or 'none'")
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
        spread = _nanstd(groups) if scale == "group" else _nanstd(groups.reshape(1, -1))
        centred = centred / (spread + 1e-4)
    return centred.flatten().nan_to_num(nan=0.0)


def rloo_advantages(rewards: Tensor, group_size: int, normalize: bool = False) -> Tensor:
    """Rewards [N] of answers, group after group, less the mean of the others of their group (RLOO:
    arXiv:2402.14740); to `normalize`, less the mean of all and over their standard deviation plus 1e-4.

    nan stands for no reward, as in `group_advantages`.

    Raises:
        ValueError: rewards that do not fill groups.
    """
    groups = _groups(rewards, group_size)
    there = (~groups.isnan()).sum(1, keepdim=True)
    others = (groups.nansum(1, keepdim=True) - groups) / (there - 1)
    found = groups - others
    if normalize:
        found = (found - found.nanmean()) / (_nanstd(found.reshape(1, -1)) + 1e-4)
    return found.flatten().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    if rewards.dim() != 1 or group_size < 2 or len(rewards) % group_size:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)}; expected [N], groups of {group_size}, of two at least"
        )
    return rewards.float().view(-1, group_size)


def _nanstd(rows: Tensor) -> Tensor:
    """The standard deviation of the numbers of each row, as of a sample: [N, M] -> [N, 1]."""
    count = (~rows.isnan()).sum(1, keepdim=True)
    squares = ((rows - rows.nanmean(1, keepdim=True)) ** 2).nansum(1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


@torch.no_grad()
def sampler_ratio(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    counted: Tensor,
    mode: str = "sequence_mask",
    low: float | None = None,
    high: float | None = 3.0,
) -> Tensor:
    """The importance of samples that another engine drew: p_old / p_sampler, [N, seq] or, of sequences (the
    product over their tokens), [N, 1].

    mode: "token" or "sequence", and what becomes of a ratio outside [low, high]: "_truncate" puts it onto
    the bound (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"),
    "_mask" makes it zero (IcePop: arXiv:2510.18855). All [N, seq]; where the sampler
    gives nan, the ratio is one.

    Raises:
        ValueError: an unknown mode, bounds between which there is nothing, or shapes that do not fit.
    """
    level, _, rule = mode.partition("_")
    if level not in ("token", "sequence") or rule not in ("truncate", "mask"):
        raise ValueError(f"unknown mode {mode!r}; expected token or sequence, with _truncate or _mask")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"found low={low}, high={high}; expected low below high")
    check_tokens(old_log_probs, sampler_log_probs=sampler_log_probs, counted=counted)
    difference = ((old_log_probs - sampler_log_probs) * counted).nan_to_num(nan=0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True)
    ratio = difference.exp()
    if rule == "truncate":
        return ratio if low is None and high is None else ratio.clamp(low, high)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    outside = outside if low is None else outside | (ratio < low)
    outside = outside if high is None else outside | (ratio > high)
    return ratio.masked_fill(outside, 0.0)


@torch.no_grad()
def on_policy(
    log_probs: Tensor, sampler_log_probs: Tensor, advantages: Tensor, counted: Tensor, threshold: float
) -> Tensor:
    """Which sequences count, [N, 1]: those with an advantage [N] from zero on, and those whose mean
    log p_sampler - log p over their tokens is at most `threshold` (DeepSeek-V3.2: arXiv:2512.02556, eq. 9).

    Raises:
        ValueError: shapes that do not fit.
    """
    check_tokens(log_probs, sampler_log_probs=sampler_log_probs, counted=counted)
    if advantages.shape != log_probs.shape[:1]:
        raise ValueError(f"found advantages {list(advantages.shape)}; expected one a sequence, [N]")
    drift = ((sampler_log_probs - log_probs).nan_to_num(nan=0.0) * counted).sum(1)
    near = drift / counted.sum(1).clamp(min=1) <= threshold
    return (near | (advantages >= 0)).unsqueeze(1)


@torch.no_grad()
def top_entropy(
    entropy: Tensor, counted: Tensor, share: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Which tokens [N, seq] are among the `share` of largest entropy of all ranks' tokens that count (Wang et
    al., 2025, arXiv:2506.01939).

    Raises:
        ValueError: a share that is none, or shapes that do not fit.
    """
    check_tokens(entropy, counted=counted)
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; expected a number from 0 to 1")
    counted = counted.bool()
    everywhere = _of_all_ranks(entropy[counted].float(), group)
    if not everywhere.numel():
        return torch.zeros_like(counted)
    return (entropy >= _quantile(everywhere, 1 - share)) & counted


def _quantile(values: Tensor, q: float) -> Tensor:
    """torch.quantile, which takes no more than 2^24 values."""
    place = q * (len(values) - 1)
    below = int(place)
    ordered = values.sort().values
    return torch.lerp(ordered[below], ordered[min(below + 1, len(values) - 1)], place - below)


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Vectors of any lengths, one behind the other."""
    if not dist.is_available() or not dist.is_initialized():
        return values
    lengths = [
        torch.zeros(1, dtype=torch.long, device=values.device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(lengths, torch.tensor([len(values)], device=values.device), group=group)
    longest = int(torch.cat(lengths).max())
    padded = torch.nn.functional.pad(values, (0, longest - len(values)))
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[: int(length)] for part, length in zip(gathered, lengths, strict=True)])
