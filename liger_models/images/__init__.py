"""Images in training data: references, pictures, and processing by the family's own processor.

a reference (path, bytes, data URL) -> picture -> the processor of transformers -> ids, marks, pixels
"""

from liger_models.images.files import Video, find_image, open_image
from liger_models.images.processor import Preprocessor, Shown

__all__ = ["Preprocessor", "Shown", "Video", "find_image", "open_image"]
