"""Images as data sets name them, and the pictures that they hold.

    "photos/a.jpg"                     a path, from the folder of the data file on, or absolute
    "data:image/png;base64,iVBO..."    a data URL, or base64 alone
    {"bytes": ..., "path": ...}        either, as tables of datasets have them
    a picture of Pillow                as datasets hand it out

A video is its frames, each named as an image is, and how many of them there are a second.

Nothing is fetched from the web: what stood at an address when a run began may be another thing tomorrow. Data
that others wrote (`folder` is None) name no files of this machine.
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
    """Frames, as they are named or as they are found, and how many of them there are a second."""

    frames: list[Any]
    fps: float

    def found(self, folder: Path | None) -> Video:
        """With frames as `find_image` finds them. Raises DataError as that does."""
        return Video([find_image(frame, folder) for frame in self.frames], self.fps)


_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")


def find_image(given: Any, folder: Path | None) -> ImageSource:
    """Where the image is that a record names: a file, or its bytes.

    Args:
        given: as above.
        folder: from which relative paths go; None: no file may be named.

    Raises:
        DataError: it is none of these, or an address on the web, or a file where none may be named.
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
            f"the image {abbreviate(given)} is an address on the web, and nothing is fetched from there; "
            "download it first, and name the file"
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
            f"the image {abbreviate(given)} is a file, and this data set may name none of this machine's; "
            "expected its bytes. If you trust the data set, download it, and name its files"
        )
    try:
        return folder / Path(given).expanduser()
    except RuntimeError as error:  # there is no such user
        raise DataError(f"the image {abbreviate(given)} is no path that can be used ({error})") from error


def open_image(source: ImageSource) -> Any:
    """The picture, in RGB, upright as its camera says it was held.

    Raises:
        DataError: there is none, or it is cut short, or of a kind that Pillow does not know.
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
        raise DataError(f"{name} is of no kind that Pillow {Image.__version__} knows") from error
    except OSError as error:
        if error.errno is not None:  # of the system, not of a decoder
            raise DataError(f"{name} cannot be read ({error.strerror})") from error
        raise DataError(f"{name} is damaged ({type(error).__name__}: {error})") from error
    except Exception as error:  # each of its decoders has its own
        raise DataError(f"{name} is damaged ({type(error).__name__}: {error})") from error


def _opened(source: ImageSource) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else os.fdopen(open_regular(source), "rb")


def most_pixels() -> int | None:
    """How many pixels an image may have in this process; None: any number."""
    from PIL import Image

    return Image.MAX_IMAGE_PIXELS


def allow_pixels(count: int | None) -> None:
    """Let images of this process have up to so many pixels; None: any number."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = count


def _decoded(text: Any) -> bytes:
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (AttributeError, binascii.Error, ValueError) as error:
        raise DataError(f"an image of bytes {abbreviate(text)} is not base64 ({error})") from error
