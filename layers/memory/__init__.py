"""GPU memory of a training step, and the activation memory levels with which it fits.

Memory peaks at one of these moments:

| moment               | in addition to the weights and the optimizer's state                              |
|----------------------|-----------------------------------------------------------------------------------|
| the loss             | activations of all layers, a chunk of logits, the head's gradient                 |
| backward of a layer  | activations of it and of earlier layers, recomputed ones, gradients computed so far |
| the embedding's      | all gradients, and a second one of a weight shared with the head                  |
| the optimizer's step | all gradients, and the part of a state on the host that is being updated          |

`choose_levels` starts by keeping everything. While the peak exceeds the budget, it lowers the level of one
layer at a time, by the least recomputation per byte saved: down to `checkpoint`, `tiled` or `offload`,
whichever recomputes the least in total. Copies to the host count as recomputation. For long sequences
`offload` recomputes less than `checkpoint`, since attention's output is on the host, too.

May import the blocks and everything below them; only the model imports it.
"""

from liger_models.layers.memory.counting import StepMemory
from liger_models.layers.memory.fitting import FittingLevels, parse_budget
from liger_models.layers.memory.frozen import layers_without_gradient
from liger_models.layers.memory.layer_costs import matrix_elements
from liger_models.layers.memory.on_host import offloaded_bytes
from liger_models.layers.memory.pictures import NOTHING, Shown, shown_of_size
from liger_models.layers.memory.planned import Planned, largest
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
    "layers_without_gradient",
    "matrix_elements",
    "offloaded_bytes",
    "parse_budget",
    "shown_of_size",
]
