"""What a family's own processor of transformers makes of a text and its images.

The processor puts as many tokens into the text as an image has features, so that what was said where is known
only before. Marks, a character each, go through it with the text: the tokenizer that it is given takes them
out again and remembers where they stood.

Of processors the form that works with Pillow is taken, which needs no torchvision; where a family has none,
and for videos, torchvision must be installed.
"""

from __future__ import annotations

import copy
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
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.layers.vision import VISIONS
from liger_models.layers.vision.packing import Seen, pack_seen, said_of

FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""What a processor is made of beside its tokenizer."""

BEGIN, END = "\U0010fffd", "\U0010fffc"  # of private use: no text has them


class Shown(NamedTuple):
    """A text with images as a model reads it.

    Attributes:
        ids: [T] int64.
        trained: which of them stand in one of the spans, [T] bool.
        images: the keywords of a call that hold the pictures, without those that say what each token is.
    """

    ids: Tensor
    trained: Tensor
    images: dict[str, Tensor]


class Preprocessor:
    """The processor in a checkpoint's folder, for a model with `vision`. It can be pickled, and is loaded
    when it is first asked for.

    Args:
        folder: with the processor's and the tokenizer's files.
        spec: of the model.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec) -> None:
        assert spec.vision is not None
        self.folder, self.spec = Path(folder), spec
        self._open: dict[ImageSource, Any] = {}  # what the last conversation showed, which the next may show

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "spec": self.spec, "_open": {}}

    def digest(self) -> str:
        """Of all that decides what becomes of an image: the same digest, the same numbers."""
        parts: list[Any] = [repr(self.spec.vision)]
        parts += [_version(name) for name in ("transformers", "pillow", "torchvision")]
        for name in FILES:
            path = self.folder / name
            parts.append(path.read_bytes().hex() if path.is_file() else None)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def __call__(self, text: str, spans: Sequence[Span], sources: Sequence[ImageSource | Video]) -> Shown:
        """What the model reads of a text, as a chat template writes it, and its images and videos.

        Args:
            text: with the family's own mark where each image or video stands.
            spans: half-open, of characters; not overlapping, in their order.
            sources: the images and videos, in the order of the text. Of a video all frames are shown.

        Raises:
            DataError: an image that cannot be read, or is smaller than a patch; images that do not fit the
                text, or that the processor or the model refuses.
        """
        if BEGIN in text or END in text:
            raise DataError(f"the text has one of the characters {BEGIN!r} and {END!r}, which mark answers")
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
                text=[_marked(text, spans)],
                return_tensors="pt",
                add_special_tokens=False,
                padding=False,
                **_as_given(videos),
            )
        except DataError:
            raise
        except Exception as error:  # of the processor's own, whatever they are
            found = f"{len(pictures)} images" + (f" and {len(videos)} videos" if videos else "")
            raise DataError(
                f"the processor of {self.folder} refuses {found} beside this text "
                f"({type(error).__name__}: {error})"
            ) from error
        images = {name: made[name] for name in made if name not in _OF_TOKENS}
        images = {name: x if isinstance(x, Tensor) else torch.as_tensor(x) for name, x in images.items()}
        ids = made["input_ids"][0]
        trained = torch.tensor(tokens_within(tokenizer.offsets, tokenizer.spans), dtype=torch.bool)
        shown = Shown(ids, trained, images)
        self.check(shown)
        return shown

    def call(self, shown: Shown) -> dict[str, Tensor]:
        """The keywords of a call of the model, beside the ids."""
        return pack_seen(self.spec.vision, [Seen(*shown)])

    def check(self, shown: Shown) -> None:
        """What the model checks of a call, without the model.

        Raises:
            DataError: the pictures do not fit the ids.
        """
        call, ids = self.call(shown), shown.ids[None]
        sight = self._vision.take(call)
        if call:
            raise DataError(
                f"the processor of {self.folder} gives {', '.join(call)}, which this model does not take"
            )
        sequences = Sequences.from_call((1, ids.shape[1]), ids.device)
        self._vision.prepare(sight, sequences, ids)
        self._vision.finish(sight)

    def image_places(self, ids: Tensor) -> Tensor:
        """Where tokens of images and videos stand among ids [T]: [n] int64."""
        said = said_of(self.spec.vision, ids, torch.zeros_like(ids), shown=False)
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
                f"model has {side} on either side; leave it out, or enlarge it yourself"
            )
        return picture

    @functools.cached_property
    def _vision(self) -> Any:
        with torch.device("meta"):
            return VISIONS[type(self.spec.vision)](self.spec.vision, self.spec.hidden_size)

    @functools.cached_property
    def _processor(self) -> Any:
        processor = _unmarking(load_processor(self.folder))
        processor.image_processor = _Remembering(processor.image_processor)
        return processor

    @functools.cached_property
    def _processor_of_videos(self) -> Any:
        return _unmarking(load_processor(self.folder, videos=True))


def load_processor(folder: Path, videos: bool = False) -> Any:
    """The processor of transformers in a folder, with the form of its image processor that needs no
    torchvision, where there is one. It takes videos if that is asked for.

    Raises:
        DataError: a package or a file is missing, or it knows no videos.
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
            f"{names['processor_class']} cannot be used, for which transformers {transformers.__version__} "
            "wants torchvision: pip install torchvision"
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
            if videos:
                made["video_processor"] = lambda: transformers.AutoVideoProcessor.from_pretrained(name)
            return [made.get(attribute, lambda: None)() for attribute in cls.get_attributes()]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    try:
        return Chosen.from_pretrained(str(folder))
    except Exception as error:  # of files that others wrote
        raise DataError(
            f"the processor in {folder} cannot be loaded ({type(error).__name__}: {error})"
        ) from error


def _check_videos(folder: Path, processor_class: Any) -> None:
    """
    Raises:
        DataError: this class of processors takes no videos, or what it needs is not installed.
    """
    instead = "give some frames of each, as images in their order"
    if "video_processor" not in processor_class.get_attributes():
        raise DataError(f"{processor_class.__name__} of {folder} takes no videos: {instead}")
    if importlib.util.find_spec("torchvision") is None:
        raise DataError(
            "videos need torchvision, for which transformers has no processor of them without: pip install "
            f"torchvision; or {instead}"
        )


def _named(folder: Path) -> dict[str, str]:
    """The names of the processor's classes, from its files."""
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
            f"{folder} holds no preprocessor_config.json, which says what becomes of images; copy the "
            "processor's files there from the model that this one was made from"
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
        raise DataError(f"{name} has no form that works with Pillow alone: pip install torchvision")
    return chosen


def _tokenizer_class(transformers: Any, base: Any) -> Any:
    if "PixtralProcessor" in [cls.__name__ for cls in base.__mro__]:  # whose config names a wrong class
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    return transformers.AutoTokenizer


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_given(videos: Sequence[tuple[list[Any], float]]) -> dict[str, Any]:
    """Keywords of a processor by which all frames of videos are shown, at their times."""
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


def _unmarking(processor: Any) -> Any:
    """The same with a tokenizer that takes marks out."""
    processor.tokenizer = _Unmarking(processor.tokenizer)
    return processor


def _marked(text: str, spans: Sequence[Span]) -> str:
    pieces, last = [], 0
    for start, stop in spans:
        pieces += [text[last:start], BEGIN, text[start:stop], END]
        last = stop
    return "".join(pieces) + text[last:]


class _Remembering:
    """An image processor that gives once more what it gave last, for the same pictures: two answers to a
    prompt show what the prompt does.
    """

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.last: tuple[Any, Any, Any] = None, None, None  # the call in brief, its pictures, what it gave

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["image_processor"], name)

    def __call__(self, images: Any, **options: Any) -> Any:
        brief = _identities(images), repr(sorted(options.items(), key=lambda option: option[0]))
        if self.last[0] != brief:
            self.last = brief, images, self.image_processor(images, **options)
        return copy.copy(self.last[2])  # of which processors take parts out


def _identities(images: Any) -> Any:
    return [_identities(one) for one in images] if isinstance(images, list | tuple) else id(images)


class _Unmarking:
    """A tokenizer that takes marks out of its text first, and notes the spans between them and the characters
    of its tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.spans: list[Span] = []
        self.offsets: list[Span] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tokenizer"], name)

    def __call__(self, text: list[str], **options: Any) -> Any:
        (marked,) = text
        clean, self.spans = "", []
        for piece in marked.split(BEGIN):
            said, end, rest = piece.partition(END)
            if end:
                self.spans.append((len(clean), len(clean) + len(said)))
            clean += said + rest
        made = self.tokenizer([clean], return_offsets_mapping=True, **options)
        (offsets,) = made.pop("offset_mapping")
        self.offsets = [(start, end) for start, end in torch.as_tensor(offsets).tolist()]
        return made


_CLASSES = ("processor_class", "image_processor_type")
_OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels")
