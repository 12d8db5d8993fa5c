"""How a model sees: pictures cut into patches, the encoder of these, and its way into the language model.

May import the blocks and what they stand on; the model imports it, and language blocks know nothing of it.
"""

from torch import nn

from liger_models.layers.specs import TiledVisionSpec, VisionSpec
from liger_models.layers.vision.tiled import TiledVision
from liger_models.layers.vision.vision import Vision

VISIONS: dict[type, type[nn.Module]] = {VisionSpec: Vision, TiledVisionSpec: TiledVision}
"""What a language model has that sees images, by the type of its spec."""
