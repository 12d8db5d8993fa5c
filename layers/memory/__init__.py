"""What a training step takes of a GPU's memory, and the levels of activation memory with which it fits.

A step's memory is largest in one of these moments:

| moment               | beside the weights and the optimizer's state                                        |
|----------------------|-------------------------------------------------------------------------------------|
| the loss             | what every layer keeps, a chunk of logits, the head's gradient                      |
| backward of a layer  | what it and the layers before it keep, what it makes again, the gradients behind it |
| the embedding's      | all gradients, and of a weight that the head shares a second one                    |
| the optimizer's step | all gradients, and what of a state on the host is at work                           |

`choose_levels` begins with everything kept, and while the largest is above the budget gives up, in one layer
after the other, what costs the least work for each byte that it saves: down to `checkpoint`; if that does not
fit, down to `tiled`; and if that does not, to `offload`.

May import the blocks and everything that they stand on, whose costs it adds up; only the model imports it.
"""

from liger_models.layers.memory.counting import Planned, StepMemory, largest
from liger_models.layers.memory.fitting import FittingLevels, parse_budget
from liger_models.layers.memory.layer_costs import matrix_elements
from liger_models.layers.memory.pictures import NOTHING, Shown, shown_of_size
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
    "largest",
    "matrix_elements",
    "parse_budget",
    "shown_of_size",
]
