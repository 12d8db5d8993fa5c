"""Processing of texts with images by a family's own processor from transformers.

The processor inserts as many tokens as an image has features, which shifts the positions of spans in the
text. Marker characters at the spans' ends therefore go through the processor, and a wrapped tokenizer removes
them and records their positions.

The Pillow-based variant of an image processor is used, which does not need torchvision; if a family has none,
and for videos, torchvision must be installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.convert.json_file import read_json
from liger_models.images.files import ImageSource, Video, open_image
from liger_models.images.spans import Span, tokens_within
from liger_models.images.wrapped import BEGIN, END, Remembering, Unused, marked, unmarking
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.layers.vision import VISIONS
from liger_models.layers.vision.packing import (
    MARKS,
    VisionConversation,
    marks_tokens,
    pack_conversations,
    predictable_tokens,
)

FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Parts of a processor other than its tokenizer."""


class Shown(NamedTuple):
    """A text with images, as model inputs.

    Attributes:
        ids: [T] int64.
        trained: which of them are inside a span, [T] bool.
        images: keyword arguments with the pictures, without token types that ids tell.
    """

    ids: Tensor
    trained: Tensor
    images: dict[str, Tensor]


class Preprocessor:
    """The processor in a checkpoint's folder, for a model with `vision`. Picklable; loaded on first use.

    Args:
        folder: with the processor's and the tokenizer's files.
        spec: the model's.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        assert spec.vision is not None
        self.folder, self.spec = Path(folder), spec
        self._open: dict[ImageSource, Any] = {}  # images of the last conversation, which the next may reuse

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "spec": self.spec, "_open": {}}

    def digest(self) -> str:
        """Digest of everything that affects the processing of an image."""
        parts: list[Any] = [repr(self.spec.vision)]
        parts += [_version(name) for name in ("transformers", "pillow", "torchvision")]
        for name in FILES:
            path = self.folder / name
            parts.append(path.read_bytes().hex() if path.is_file() else None)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __call__(self, text: str, spans: Sequence[Span], sources: Sequence[ImageSource | Video]) -> Shown:
        """Model inputs for a text, as rendered by a chat template, with its images and videos.

        Args:
            text: with the family's placeholder for each image or video.
            spans: half-open character ranges; disjoint and ordered.
            sources: the images and videos, in the order of the text. All frames of a video are used.

        Raises:
            DataError: an unreadable image, or one smaller than a patch; images that do not match the text, or
                that the processor or the model rejects.
        """
        if BEGIN in text or END in text:
            raise DataError(f"the text has {BEGIN!r} or {END!r}, which are reserved to mark answers")
        alone = [source for source in sources if not isinstance(source, Video)]
        self._open = {
            one: self._open[one] if one in self._open else self._opened(one) for one in dict.fromkeys(alone)
        }
        pictures = [self._open[source] for source in alone]
        videos = [self._frames(source) for source in sources if isinstance(source, Video)]
        processor = self._processor_of_videos if videos else self._processor
        tokenizer = processor.tokenizer
        try:
            made = processor(
                images=[pictures] if pictures else None,
                text=[marked(text, spans)],
                return_tensors="pt",
                add_special_tokens=False,
                padding=False,
                **_as_given(videos),
            )
        except DataError:
            raise
        except Exception as error:  # processors raise various exceptions
            found = f"{len(pictures)} images" + (f" and {len(videos)} videos" if videos else "")
            raise DataError(
                f"the processor of {self.folder} rejects {found} with this text "
                f"({type(error).__name__}: {error})"
            ) from error
        kept = {MARKS} if sources and marks_tokens(self.spec.vision) else set()
        images = {name: made[name] for name in made if name not in _OF_TOKENS or name in kept}
        images = {name: x if isinstance(x, Tensor) else torch.as_tensor(x) for name, x in images.items()}
        ids = made["input_ids"][0]
        trained = torch.tensor(tokens_within(tokenizer.offsets, tokenizer.spans), dtype=torch.bool)
        shown = Shown(ids, trained, images)
        self.check(shown)
        return shown

    def call(self, shown: Shown) -> dict[str, Tensor]:
        """Keyword arguments of a call of the model, without the ids."""
        return pack_conversations(self.spec.vision, [VisionConversation(*shown)])

    def check(self, shown: Shown) -> None:
        """Run the model's input checks, without the model.

        Raises:
            DataError: the pictures do not match the ids.
        """
        call, ids = self.call(shown), shown.ids[None]
        vision_inputs = self._vision.take(call)
        if call:
            raise DataError(
                f"the processor of {self.folder} returns {', '.join(call)}, which this model does not accept"
            )
        sequences = Sequences.from_call((1, ids.shape[1]), ids.device)
        self._vision.prepare(vision_inputs, sequences, ids)
        self._vision.finish(vision_inputs)

    def image_places(self, ids: Tensor) -> Tensor:
        """Positions of image and video tokens in ids [T], and of those that frame them: [n] int64."""
        said = predictable_tokens(self.spec.vision, ids, torch.zeros_like(ids), shown=False)
        return (~said).nonzero()[:, 0]

    def _frames(self, video: Video) -> tuple[list[Any], float]:
        frames = [self._opened(frame) for frame in video.frames]
        if len(sizes := {frame.size for frame in frames}) > 1:
            found = " and ".join(f"{width} times {height}" for width, height in sorted(sizes)[:2])
            raise DataError(f"a video has frames of {found} pixels; expected one size")
        return frames, video.fps

    def _opened(self, source: ImageSource) -> Any:
        assert self.spec.vision is not None
        picture = open_image(source)
        side = self.spec.vision.patches.size
        if min(picture.size) < side:
            name = "an image given as bytes" if isinstance(source, bytes) else f"the image {source}"
            raise DataError(
                f"{name} is too small: {picture.width} times {picture.height} pixels, and a patch of this "
                f"model has {side} per side; remove it or enlarge it"
            )
        return picture

    @functools.cached_property
    def _vision(self) -> Any:
        with torch.device("meta"):
            return VISIONS[type(self.spec.vision)](self.spec.vision, self.spec.hidden_size)

    @functools.cached_property
    def _processor(self) -> Any:
        processor = unmarking(load_processor(self.folder))
        processor.image_processor = Remembering(processor.image_processor)
        return processor

    @functools.cached_property
    def _processor_of_videos(self) -> Any:
        return unmarking(load_processor(self.folder, videos=True))


def load_processor(folder: Path, videos: bool = False) -> Any:
    """Load the transformers processor of a folder, with the image processor variant that does not need
    torchvision if it exists; with video support on request.

    Raises:
        DataError: a package or a file is missing, or the processor does not support videos.
    """
    try:
        import transformers
    except ImportError as error:
        raise DataError("images need transformers: pip install 'liger_models[vision]'") from error
    names = _named(folder)
    try:
        base = getattr(transformers, names["processor_class"], None)
    except ImportError as error:
        raise DataError(f"{names['processor_class']} cannot be used: {error.__cause__ or error}") from error
    image_class = _image_class(transformers, names["image_processor_type"])
    if base is None:
        raise DataError(
            f"{folder}: transformers {transformers.__version__} has no {names['processor_class']}"
        )
    if getattr(base, "is_dummy", False):
        raise DataError(
            f"{names['processor_class']} cannot be used: transformers {transformers.__version__} requires "
            "torchvision for it: pip install torchvision"
        )
    tokenizer_class = _tokenizer_class(transformers, base)
    if videos:
        _check_videos(folder, base)

    class Chosen(base):  # type: ignore[valid-type, misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> list[Any]:
            made = {
                "image_processor": lambda: image_class.from_pretrained(name),
                "tokenizer": lambda: tokenizer_class.from_pretrained(name),
            }
            made["video_processor"] = Unused  # some read its settings for images, too
            if videos:
                made["video_processor"] = lambda: transformers.AutoVideoProcessor.from_pretrained(name)
            return [made.get(attribute, lambda: None)() for attribute in cls.get_attributes()]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if argument is None or isinstance(argument, Unused):
                return None
            return super().check_argument_for_proper_class(name, argument)

    try:
        processor = Chosen.from_pretrained(str(folder))
    except Exception as error:  # caused by the checkpoint's files
        raise DataError(
            f"the processor in {folder} cannot be loaded ({type(error).__name__}: {error})"
        ) from error
    if not videos and hasattr(processor, "video_processor"):
        processor.video_processor = None
    return processor


def _check_videos(folder: Path, processor_class: Any) -> None:
    """Check for video support.

    Raises:
        DataError: this processor class does not support videos, or a requirement is not installed.
    """
    instead = "pass some frames of each as images"
    if "video_processor" not in processor_class.get_attributes():
        raise DataError(f"{processor_class.__name__} of {folder} does not support videos: {instead}")
    if importlib.util.find_spec("torchvision") is None:
        raise DataError(
            "videos need torchvision, since transformers has no video processor without it: pip install "
            f"torchvision; or {instead}"
        )


def _named(folder: Path) -> dict[str, str]:
    """Names of the processor's classes, from its files."""
    found: dict[str, str] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            content = read_json(path, DataError)
            content = {**content, **(content.get("image_processor") or {})}
        except TypeError as error:
            raise DataError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        found |= {key: content[key] for key in _CLASSES if content.get(key)}
    if not found:
        raise DataError(
            f"{folder} holds no preprocessor_config.json, which configures image processing; copy the "
            "processor's files there from the original model"
        )
    if missing := [key for key in _CLASSES if key not in found]:
        raise DataError(f"{folder / 'preprocessor_config.json'} names no {missing[0]}")
    return found


def _image_class(transformers: Any, name: str) -> Any:
    name = name.removesuffix("Fast")
    chosen = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    if chosen is None:
        raise DataError(f"transformers {transformers.__version__} has no image processor {name}")
    if chosen.__name__ == name and importlib.util.find_spec("torchvision") is None:
        raise DataError(f"{name} has no variant for Pillow: pip install torchvision")
    return chosen


def _tokenizer_class(transformers: Any, base: Any) -> Any:
    if "PixtralProcessor" in [cls.__name__ for cls in base.__mro__]:  # its config names a wrong class
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    return transformers.AutoTokenizer


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_given(videos: Sequence[tuple[list[Any], float]]) -> dict[str, Any]:
    """Processor arguments that keep all frames of videos, with their times."""
    if not videos:
        return {}
    import numpy

    about = [
        {
            "total_num_frames": len(frames),
            "fps": fps,
            "duration": len(frames) / fps,
            "frames_indices": list(range(len(frames))),
            "width": frames[0].width,
            "height": frames[0].height,
        }
        for frames, fps in videos
    ]
    pixels = [numpy.stack([numpy.asarray(frame) for frame in frames]) for frames, _ in videos]
    return {"videos": pixels, "video_metadata": about, "do_sample_frames": False}


_CLASSES = ("processor_class", "image_processor_type")
_OF_TOKENS = (
    *("input_ids", "attention_mask", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"),
    "labels",
)
