"""Load balancing by a bias instead of a loss (Wang et al., 2024, arXiv:2408.15664; DeepSeek-V3,
arXiv:2412.19437, section 2.1.2).

    bias_e += rate * sign(mean load - load_e)          load_e: tokens routed to expert e in this step

The bias only affects the choice of experts, so it has no gradient: a training loop calls
`update_correction_bias` after each optimizer step. Routers count their load on the device during training,
without synchronising.

    loss.backward()
    optimizer.step()
    update_correction_bias(model)
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from liger_models.layers.experts.router import Router


@torch.no_grad()
def update_correction_bias(
    model: nn.Module, rate: float = 0.001, group: distributed.ProcessGroup | None = None
) -> None:
    """Move each router's correction bias by `rate` against its load since the last call, and reset the
    counts.

    Call this once per step, regardless of the number of forward passes. Only forward passes in training mode
    are counted, and once even if recomputed in the backward pass; padding is not counted, since it does not
    reach the routers.

    Args:
        model: routers without a correction bias are skipped, and so are frozen ones.
        rate: step size >= 0; DeepSeek-V3 used 0.001, and 0 at the end of training.
        group: the ranks that split each batch, whose loads are summed with one collective: all must call.
            Default: all ranks, if torch.distributed is initialised.

    Raises:
        ValueError: a rate that is negative or not finite.
    """
    if not 0 <= rate < float("inf"):
        raise ValueError(f"rate is {rate}; expected a number of 0 or more")
    routers = [m for m in model.modules() if isinstance(m, Router) and m.correction_bias is not None]
    routers = [router for router in routers if any(p.requires_grad for p in router.parameters())]
    if not routers:
        return
    loads = _joint_loads(routers, group)
    for router, load in zip(routers, loads, strict=True):
        bias = router.correction_bias
        assert bias is not None
        # mean - load without rounding: load.sum() - E * load has its sign.
        direction = (load.sum() - load.numel() * load).sign()
        bias.add_(direction.to(bias), alpha=rate)
        if router.load is not None:
            router.load.zero_()


def forget_load(model: nn.Module) -> None:
    """Reset the counts without moving a bias: the counted step is discarded."""
    for module in model.modules():
        if isinstance(module, Router) and module.load is not None:
            module.load.zero_()


def _joint_loads(routers: list[Router], group: distributed.ProcessGroup | None) -> list[Tensor]:
    """Tokens per expert of each router [E], on its device, summed over ranks. A rank may have had none."""
    biases = [router.correction_bias for router in routers]
    own = [
        torch.zeros_like(bias, dtype=torch.int64) if router.load is None else router.load
        for router, bias in zip(routers, biases, strict=True)
        if bias is not None
    ]
    if not (distributed.is_available() and distributed.is_initialized()):
        return own
    joint = torch.cat([load.to(own[0].device) for load in own])
    distributed.all_reduce(joint, group=group)
    parts = joint.split([load.numel() for load in own])
    return [part.to(load.device) for part, load in zip(parts, own, strict=True)]
