"""Images in training data: references, pictures, and processing by the family's own processor.

a reference (path, bytes, data URL) -> picture -> the processor of transformers -> ids, marks, pixels

May import the vision layers and specs; the tokenizer, training data and models import it.
"""

from liger_models.images.files import Video, find_image, open_image
from liger_models.images.processor import Preprocessor, Shown

__all__ = ["Preprocessor", "Shown", "Video", "find_image", "open_image"]
