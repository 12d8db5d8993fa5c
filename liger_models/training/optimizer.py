"""AdamW (Loshchilov & Hutter, 2019), as a run uses it."""

from __future__ import annotations

from itertools import compress
from operator import not_

from torch import nn

from liger_models.layers.projections.matrices import matrices
from liger_models.optim.adamw import AdamW

# The second moment forgets faster than Adam's default 0.999, as is usual for language models since GPT-3
# (Brown et al., 2020, appendix B): a run of some thousand steps never sees the end of a 1000-step memory.
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
    """AdamW that decays matrices only: to pull a norm's weight, a bias or the taps of a short convolution to
    zero regularises nothing, also where those of all heads or experts are one tensor.
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
