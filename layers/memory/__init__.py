"""GPU memory of a training step, and the activation memory levels with which it fits.

May import the blocks and everything below them; only the model imports it.
"""

from liger_models.layers.memory.counting import StepMemory
from liger_models.layers.memory.fitting import FittingLevels, parse_budget
from liger_models.layers.memory.on_host import offloaded_bytes
from liger_models.layers.memory.pictures import NOTHING, Shown, shown_of_size
from liger_models.layers.memory.places import matrix_elements
from liger_models.layers.memory.planned import Planned, largest, layers_without_gradient
from liger_models.layers.memory.sounds import heard_of_length
from liger_models.layers.memory.step import LADDERS, Plan, Step

__all__ = [
    "LADDERS",
    "NOTHING",
    "FittingLevels",
    "Plan",
    "Planned",
    "Shown",
    "Step",
    "StepMemory",
    "heard_of_length",
    "largest",
    "layers_without_gradient",
    "matrix_elements",
    "offloaded_bytes",
    "parse_budget",
    "shown_of_size",
]
