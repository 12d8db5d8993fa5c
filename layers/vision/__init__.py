"""Vision inputs: images cut into patches, their encoder, and its connection to the language model.

May import the blocks and everything below them; the model imports it, and language blocks do not.
"""

from torch import nn

from liger_models.layers.specs import TiledVisionSpec, VisionSpec
from liger_models.layers.vision.tiled import TiledVision
from liger_models.layers.vision.vision import Vision

VISIONS: dict[type, type[nn.Module]] = {VisionSpec: Vision, TiledVisionSpec: TiledVision}
"""Vision modules of a language model, by the type of their spec."""
