"""AdamW (Loshchilov & Hutter, 2019) of a run."""

from __future__ import annotations

from itertools import compress
from operator import not_

from torch import nn

from liger_models.layers.projections.matrices import matrices
from liger_models.optim.adamw import AdamW

# The second moment forgets faster than with Adam's default 0.999, as usual for language models since GPT-3
# (Brown et al., 2020, appendix B): runs of some thousand steps are too short for a memory of 1000 steps.
BETAS = (0.9, 0.95)
EPS = 1e-8


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
    """AdamW with weight decay on matrices only: decaying a norm's weight, a bias or a short convolution's
    taps regularises nothing, even if those of all heads or experts form one tensor.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = {id(p) for *_, p in matrices(model)}
    decays = [id(p) in decayed for p in parameters]
    groups = [
        {"params": list(compress(parameters, decays)), "weight_decay": weight_decay},
        {"params": list(compress(parameters, map(not_, decays))), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(
        *(groups, lr, BETAS, EPS), weights=weights, moments=moments, seed=seed, state_device=state_device
    )
