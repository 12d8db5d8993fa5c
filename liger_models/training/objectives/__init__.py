"""Training objectives: `make_objective("dpo", {"beta": 0.1})`.

May import losses, the data and the metrics; never the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from liger_models.convert.errors import ConfigError
from liger_models.training.objectives.distill import Distill
from liger_models.training.objectives.grpo import GRPO
from liger_models.training.objectives.kto import KTO
from liger_models.training.objectives.objective import Objective, Share
from liger_models.training.objectives.preferences import DPO, ORPO, SimPO
from liger_models.training.objectives.reward import Reward
from liger_models.training.objectives.sft import SFT

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SFT,
    "dpo": DPO,
    "orpo": ORPO,
    "simpo": SimPO,
    "kto": KTO,
    "reward": Reward,
    "distill": Distill,
    "grpo": GRPO,
}


def options_of(name: str) -> tuple[str, ...]:
    """Names of an objective's options."""
    return tuple(field.name for field in fields(OBJECTIVES[name]) if field.init)


def make_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """Create the objective of this name.

    Raises:
        ConfigError: unknown objective, unknown option, or an invalid value.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective is {name!r}; expected one of {', '.join(OBJECTIVES)}")
    known = options_of(name)
    if unknown := sorted(options.keys() - set(known)):
        raise ConfigError(
            f"the objective {name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
    return OBJECTIVES[name](**options)


__all__ = ["OBJECTIVES", "Objective", "Share", "make_objective", "options_of"]
