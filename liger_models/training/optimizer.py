"""AdamW (Loshchilov & Hutter, 2019) and the learning rate's course over a run.

    lr(step) = peak * min(1, (step + 1) / warmup) * decay((step - warmup) / (total - warmup))

with decay(x) = 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine; Loshchilov & Hutter, 2017).
"""

from __future__ import annotations

import math

from torch import nn

from liger_models.optim.adamw import AdamW

# The second moment forgets faster than Adam's default 0.999, as is usual for language models since GPT-3
# (Brown et al., 2020, appendix B): a run of some thousand steps never sees the end of a 1000-step memory.
BETAS = (0.9, 0.95)
EPS = 1e-8


def learning_rate(step: int, *, peak: float, total: int, warmup: int, schedule: str) -> float:
    """The rate of step number `step`, counted from 0, in a run of `total` steps."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
    return peak * max(0.0, decay)


def build_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    weights: str,
    moments: str,
    seed: int,
    state_device: str | None = None,
) -> AdamW:
    """AdamW that decays matrices only: to pull a norm's weight or a bias to zero regularises nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(
        *(groups, lr, BETAS, EPS), weights=weights, moments=moments, seed=seed, state_device=state_device
    )
