"""Learning rate and weight decay where none are given: by objective, and by what is trained.

| trained                         | learning rate | weight decay |
|---------------------------------|---------------|--------------|
| a preset's fresh weights        | 3e-4          | 0.1          |
| a checkpoint: sft, distill      | 2e-5          | 0            |
| a checkpoint: reward            | 1e-5          | 0            |
| a checkpoint: other objectives  | 1e-6          | 0            |
| adapters                        | ten times as much | 0        |

Preferences move a model that is already tuned, at rates of about 1e-6 (Rafailov et al., 2023, appendix B).
Adapters want about ten times the learning rate of full training, whatever their rank (Schulman, 2025, "LoRA
Without Regret").
"""

from __future__ import annotations

from typing import NamedTuple


class Defaults(NamedTuple):
    """Defaults of the optimizer."""

    lr: float
    weight_decay: float


_OF_CHECKPOINTS = {"sft": 2e-5, "distill": 2e-5, "reward": 1e-5}
_OF_PREFERENCES = 1e-6


def find_defaults(objective: str, *, fresh: bool, adapters: bool) -> Defaults:
    """The defaults for an objective; `fresh`: the weights are random, not a checkpoint's."""
    if fresh and not adapters:
        return Defaults(3e-4, 0.1)
    rate = _OF_CHECKPOINTS.get(objective, _OF_PREFERENCES)
    return Defaults(float(f"{10 * rate:g}") if adapters else rate, 0.0)
