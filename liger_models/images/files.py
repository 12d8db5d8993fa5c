"""References to images in data sets, and loading them as pictures.

    "photos/a.jpg"                     a path, relative to the data file's folder or absolute
    "data:image/png;base64,iVBO..."    a data URL, or plain base64
    {"bytes": ..., "path": ...}        either, as in tables of datasets
    a picture of Pillow                as datasets returns it

A video is a list of frames, each referenced like an image, and a frame rate.

Nothing is fetched from the web, where content may change between runs. Data sets from others (`folder` is
None) cannot reference files of this machine.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from liger_models.convert.errors import DataError, abbreviate
from liger_models.convert.regular_file import open_regular

ImageSource = Path | bytes


class Video(NamedTuple):
    """Frames, as references or as found, and their number per second."""

    frames: list[Any]
    fps: float

    def found(self, folder: Path | None) -> Video:
        """Resolve the frames with `find_image`, raising DataError as that does."""
        return Video([find_image(frame, folder) for frame in self.frames], self.fps)


_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")


def find_image(given: Any, folder: Path | None) -> ImageSource:
    """Resolve a record's image reference to a file or to bytes.

    Args:
        given: as above.
        folder: base of relative paths; None: files are not allowed.

    Raises:
        DataError: not a valid reference, a web address, or a file where none is allowed.
    """
    if isinstance(given, dict):
        chosen = given.get("bytes") if given.get("bytes") is not None else given.get("path")
        return find_image(_decoded(chosen) if given.get("bytes") is not None else chosen, folder)
    if isinstance(given, bytes | bytearray):
        return bytes(given)
    if hasattr(given, "save") and hasattr(given, "getbands"):
        file = io.BytesIO()
        given.save(file, format="PNG" if given.mode in _OF_PNG else "TIFF")  # both without loss
        return file.getvalue()
    if not isinstance(given, str) or not given:
        raise DataError(f"an image is {abbreviate(given)}; expected a path, bytes as base64, or a data URL")
    scheme = given[:8].partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise DataError(
            f"the image {abbreviate(given)} is a web address, and nothing is downloaded during training; "
            "download it first, and pass the file"
        )
    if scheme == "data":
        head, comma, content = given.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise DataError(f"the data URL {abbreviate(given)} is not data:image/...;base64,...")
        return _decoded(content)
    if scheme == "file":
        given = urllib.parse.unquote(urllib.parse.urlparse(given).path)
    elif _BASE64.fullmatch(given) and not (folder and len(given) < 256 and (folder / given).is_file()):
        return _decoded(given)
    if folder is None:
        raise DataError(
            f"the image {abbreviate(given)} is a file, but this data set may not reference files of this "
            "machine; expected its bytes. If you trust the data set, download it, and pass its files"
        )
    try:
        return folder / Path(given).expanduser()
    except RuntimeError as error:  # unknown user in ~user
        raise DataError(f"the image {abbreviate(given)} is not a usable path ({error})") from error


def open_image(source: ImageSource) -> Any:
    """Load the picture, in RGB, rotated according to its EXIF orientation.

    Raises:
        DataError: the file is missing, truncated, or in a format unknown to Pillow.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError("images need Pillow: pip install 'liger_models[vision]'") from error
    name = "an image given as bytes" if isinstance(source, bytes) else f"the image {source}"
    limit = most_pixels()
    too_large = (
        f"{limit or 0:,} pixels, which could fill the memory; make it smaller, or raise the limit "
        "(--max-image-pixels, or PIL.Image.MAX_IMAGE_PIXELS)"
    )
    try:
        with _opened(source) as file, Image.open(file) as picture:
            if limit is not None and picture.width * picture.height > limit:
                size = f"{picture.width:,} times {picture.height:,}"
                raise DataError(f"{name} is too large: {size} pixels, more than {too_large}")
            picture.load()
            return ImageOps.exif_transpose(picture).convert("RGB")
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large: more than twice {too_large}") from error
    except Image.UnidentifiedImageError as error:
        raise DataError(f"{name} is in a format that Pillow {Image.__version__} does not know") from error
    except OSError as error:
        if error.errno is not None:  # an error of the system, not of a decoder
            raise DataError(f"{name} cannot be read ({error.strerror})") from error
        raise DataError(f"{name} is damaged ({type(error).__name__}: {error})") from error
    except Exception as error:  # decoders raise various exceptions
        raise DataError(f"{name} is damaged ({type(error).__name__}: {error})") from error


def _opened(source: ImageSource) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else os.fdopen(open_regular(source), "rb")


def most_pixels() -> int | None:
    """Maximum number of pixels of an image in this process; None: unlimited."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS


def allow_pixels(count: int | None) -> None:
    """Set the maximum number of pixels of an image in this process; None: unlimited."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = count


def _decoded(text: Any) -> bytes:
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (AttributeError, binascii.Error, ValueError) as error:
        raise DataError(f"an image of bytes {abbreviate(text)} is not base64 ({error})") from error
