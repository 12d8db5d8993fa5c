"""The load of experts balanced by a bias and not by a loss (Wang et al., 2024, arXiv:2408.15664; DeepSeek-V3,
arXiv:2412.19437, section 2.1.2).

    bias_e += rate * sign(mean load - load_e)          load_e: the tokens that went to expert e in this step

The bias takes part in the choice of experts alone, so that no gradient reaches it: a training loop calls
`update_correction_bias` after each step of the optimizer. The routers count what they route while they train,
on their device; nothing waits for it.

    loss.backward()
    optimizer.step()
    update_correction_bias(model)
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from liger_models.layers.experts.moe import Router


@torch.no_grad()
def update_correction_bias(
    model: nn.Module, rate: float = 0.001, group: distributed.ProcessGroup | None = None
) -> None:
    """Move each router's correction bias by `rate` against its load since the last call, and count anew.

    A call for each step, however many forward passes it has. A forward pass counts in training mode alone,
    and once, though the backward pass may run it again; padding does not count, for no router sees it.

    Args:
        model: routers without a correction bias in it stay as they are.
        rate: the step; DeepSeek-V3 took 0.001, and 0 for the last of its training. Not negative.
        group: the ranks that split each batch, whose loads are added, with one collective: all must call.
            Default: all ranks, where torch.distributed is initialised.

    Raises:
        ValueError: a rate that is negative or no number.
    """
    if not 0 <= rate < float("inf"):
        raise ValueError(f"rate is {rate}; expected a number of 0 or more")
    routers = [m for m in model.modules() if isinstance(m, Router) and m.correction_bias is not None]
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
    """Count anew, without moving a bias: the step that was counted does not happen."""
    for module in model.modules():
        if isinstance(module, Router) and module.load is not None:
            module.load.zero_()


def _joint_loads(routers: list[Router], group: distributed.ProcessGroup | None) -> list[Tensor]:
    """Of each router [E], on its device: the tokens of all ranks. A rank may have had none."""
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
