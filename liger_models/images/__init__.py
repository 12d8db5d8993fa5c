"""Images in training data: from a reference (path, bytes, data URL) to the output of the family's processor.

May import the vision layers and specs; the tokenizer, training data and models import it.
"""

from liger_models.images.files import Video, find_image, open_image
from liger_models.images.processor import Preprocessor, Shown

__all__ = ["Preprocessor", "Shown", "Video", "find_image", "open_image"]
