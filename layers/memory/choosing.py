"""The choice of levels.

It starts by keeping everything. While the peak exceeds the budget, it lowers the level of one layer at a
time, by the least recomputation per byte saved: down to `checkpoint`, `tiled` or `offload`, whichever
recomputes the least in total. Copies to the host count as recomputation. For long sequences `offload`
recomputes less than `checkpoint`, since attention's output is on the host, too.

One layer in every `SPACING` may have the level `lean@host`, if its copies take less time than so many layers:
as many as fit in a share of the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from liger_models.layers.memory.layer_costs import LayerCosts
from liger_models.layers.memory.step import LADDERS, Plan
from liger_models.layers.recompute.activation_memory import ON_HOST, ActivationMemory
from liger_models.layers.recompute.offload import SHARE
from liger_models.layers.recompute.saved_on_host import AHEAD, SPACING


class Counted(Protocol):
    """A step whose memory is counted: `StepMemory`."""

    @property
    def stages(self) -> list[LayerCosts]:
        """All layers, those of encoders first."""

    @property
    def encoder(self) -> list[LayerCosts]:
        """Those of encoders."""

    def plan(self, levels: Sequence[ActivationMemory], budget: int | None, host_budget: int | None) -> Plan:
        """The step with these levels."""


# Matrix operations in the time in which a byte is copied over 16 lanes of PCIe 5: 660 TFLOP/s and 50 GB/s.
# (An A100 with PCIe 4 has nearly the same ratio.)
OPERATIONS_OF_A_COPY = 13_000


def cheapest_plan(
    step: Counted, budget: int, host_budget: int | None, operations_of_a_copy: float = OPERATIONS_OF_A_COPY
) -> Plan:
    """The levels with the least recomputation among those with which the step fits, copies to the host
    included; if none fits, those with the lowest peak.

    Args:
        budget, host_budget: bytes available on the device and the host. If the latter is not known, no layer
            gets the level `lean@host`.
        operations_of_a_copy: in the time in which a byte is copied between them.
    """
    plans: list[Plan] = []
    for ladder in LADDERS:
        ladders = [ladder] * len(step.stages)
        plans += _descend(step, ladders, budget, host_budget)
        if plans[0].fits:  # which recomputes nothing
            return plans[0]
        if (with_host := _with_host(step, ladder, host_budget or 0, operations_of_a_copy)) != ladders:
            plans += _descend(step, with_host, budget, host_budget)
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.repeated)
    return min(plans, key=lambda plan: plan.peak)


Ladder = Sequence[ActivationMemory]


def _with_host(step: Counted, ladder: Ladder, host_budget: int, operations_of_a_copy: float) -> list[Ladder]:
    """The ladder of each layer, with `lean@host` for some."""
    stages, first = step.stages, len(step.encoder)
    ladders, left = [ladder] * len(stages), SHARE * host_budget
    for i in range(first, len(stages) - SPACING, SPACING):
        left -= stages[i].saved_on_host
        hidden = operations_of_a_copy * _leaving(stages[i]) <= SPACING * stages[i].forward
        if hidden and left >= 0:
            ladders[i] = (*ladder[:2], ON_HOST, *ladder[2:])
    return ladders


def _descend(step: Counted, ladders: Sequence[Ladder], budget: int, host_budget: int | None) -> list[Plan]:
    """One level for all layers, lowered step by step until the step fits."""
    same = [level for level in ladders[-1] if all(level in ladder for ladder in ladders)]
    plans = [step.plan([level] * len(ladders), budget, host_budget) for level in same]
    plan, levels = plans[0], [same[0]] * len(ladders)
    while not plan.fits:
        keeps, stages = host_budget is not None, zip(step.stages, levels, ladders, strict=True)
        found = [costs.next_of(level, ladder, keeps) for costs, level, ladder in stages]
        further = [(price, i, to) for i, (price, to) in enumerate(found) if to is not None]
        if not further:
            break
        # The first of equal layers, since it keeps its tensors the longest.
        _, i, to = min(further)
        levels[i] = to
        plan = step.plan(levels, budget, host_budget)
        plans.append(plan)
    return plans


def not_yet_away(stages: Sequence[LayerCosts], levels: Sequence[ActivationMemory]) -> int:
    """Bytes at the end of the forward pass of layers at `lean@host` whose copies may not have ended."""
    last = range(max(0, len(levels) - SPACING), len(levels))
    return sum(_leaving(stages[i]) for i in last if levels[i] == ON_HOST)


def back_again(stages: Sequence[LayerCosts], levels: Sequence[ActivationMemory], layer: int) -> int:
    """Bytes on the device, in the backward pass of a layer, of layers at `lean@host` that come after it."""
    following = range(max(0, layer - AHEAD), layer)
    return sum(_leaving(stages[i]) for i in following if levels[i] == ON_HOST)


def _leaving(costs: LayerCosts) -> int:
    return costs.kept["lean"] - costs.kept[ON_HOST]
