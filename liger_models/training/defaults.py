"""Learning rate and weight decay where none are given: by objective, by what is trained, and by optimizer.

| trained                         | AdamW, Muon   | Adafactor | weight decay                   |
|---------------------------------|---------------|-----------|--------------------------------|
| a preset's fresh weights        | 3e-4          | 1e-2      | 0.1; adafactor and sgd: 0      |
| a checkpoint: sft, distill      | 2e-5          | 1e-3      | 0                              |
| a checkpoint: reward            | 1e-5          | 5e-4      | 0                              |
| a checkpoint: other objectives  | 1e-6          | 5e-5      | 0                              |
| adapters                        | ten times as much | ten times as much | 0                  |

Preferences move a model that is already tuned, at rates of about 1e-6 (Rafailov et al., 2023, appendix B).
Adapters want about ten times the learning rate of full training, whatever their rank (Schulman, 2025, "LoRA
Without Regret"). Muon's updates have the size of AdamW's (Liu et al., 2025, arXiv:2502.16982). Adafactor's
rate is relative to the size of each matrix: 1e-2 from fresh weights (Shazeer & Stern, 2018, section 9), 1e-3
for fine-tuning (Raffel et al., 2020, section 3.1.2). The size of SGD's steps is that of the gradient, which
no default fits.
"""

from __future__ import annotations

from typing import NamedTuple


class Defaults(NamedTuple):
    """Defaults of the optimizer; lr None: there is none."""

    lr: float | None
    weight_decay: float
    weights: str = "master"


_OF_CHECKPOINTS = {"sft": 2e-5, "distill": 2e-5, "reward": 1e-5}
_OF_PREFERENCES = 1e-6
_ADAFACTOR = 50  # its rates over AdamW's


def find_defaults(objective: str, optimizer: str, *, fresh: bool, adapters: bool) -> Defaults:
    """The defaults for an objective; `fresh`: the weights are random, not a checkpoint's."""
    if optimizer == "sgd":
        return Defaults(None, 0.0)
    if fresh and not adapters:
        return Defaults(1e-2, 0.0) if optimizer == "adafactor" else Defaults(3e-4, 0.1)
    rate = _OF_CHECKPOINTS.get(objective, _OF_PREFERENCES)
    if optimizer == "adafactor":
        rate *= _ADAFACTOR
    return Defaults(float(f"{10 * rate:g}") if adapters else rate, 0.0)
