"""Token weights of policy gradients: advantages from rewards, ratios between the sampling engine and the
trained model, and token filters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.losses.rows import check_tokens


def group_advantages(rewards: Tensor, group_size: int, scale: str = "group") -> Tensor:
    """Rewards [N] of answers, grouped consecutively, minus their group's mean (GRPO: arXiv:2402.03300, sec.
    4.1).

    scale: divide by the standard deviation of the "group" or of the "batch" (arXiv:2508.08221), plus 1e-4; or
    "none" (Dr. GRPO: arXiv:2503.20783). Pass all of a step's rewards in one call, including other ranks'. nan
    means no reward: the answer's advantage is zero, and the rest of its group counts.

    Raises:
        ValueError: the rewards do not fill whole groups, or an unknown scale.
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
    """Rewards [N] of answers, grouped consecutively, minus the mean of the others in their group (RLOO:
    arXiv:2402.14740). `normalize` then subtracts the overall mean and divides by the standard deviation plus
    1e-4.

    nan means no reward, as in `group_advantages`.

    Raises:
        ValueError: the rewards do not fill whole groups.
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
            f"rewards have shape {list(rewards.shape)}; expected [N], groups of {group_size}, at least 2"
        )
    return rewards.float().view(-1, group_size)


def _nanstd(rows: Tensor) -> Tensor:
    """Sample standard deviation of each row, ignoring nan: [N, M] -> [N, 1]."""
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
    """Importance ratios for samples drawn by another engine: p_old / p_sampler, [N, seq], or for sequences
    (the product over tokens) [N, 1].

    mode: "token" or "sequence", and the treatment of ratios outside [low, high]: "_truncate" clips them (Yao
    et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"), "_mask" sets them
    to zero (IcePop: arXiv:2510.18855). All inputs [N, seq]; where the sampler's is nan, the ratio is one.

    Raises:
        ValueError: an unknown mode, empty bounds, or incompatible shapes.
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
    """Mask [N, 1] of sequences with a non-negative advantage [N], or whose mean log p_sampler - log p over
    tokens is at most `threshold` (DeepSeek-V3.2: arXiv:2512.02556, eq. 9).

    Raises:
        ValueError: incompatible shapes.
    """
    check_tokens(log_probs, sampler_log_probs=sampler_log_probs, counted=counted)
    if advantages.shape != log_probs.shape[:1]:
        raise ValueError(f"found advantages {list(advantages.shape)}; expected one per sequence, [N]")
    drift = ((sampler_log_probs - log_probs).nan_to_num(nan=0.0) * counted).sum(1)
    near = drift / counted.sum(1).clamp(min=1) <= threshold
    return (near | (advantages >= 0)).unsqueeze(1)


@torch.no_grad()
def top_entropy(
    entropy: Tensor, counted: Tensor, share: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Mask of the tokens [N, seq] in the fraction `share` with the largest entropy among counted tokens of
    all ranks (Wang et al., 2025, arXiv:2506.01939).

    Raises:
        ValueError: an invalid share, or incompatible shapes.
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
    """torch.quantile without its limit of 2^24 values."""
    place = q * (len(values) - 1)
    below = int(place)
    ordered = values.sort().values
    return torch.lerp(ordered[below], ordered[min(below + 1, len(values) - 1)], place - below)


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate vectors of any lengths from all ranks."""
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
