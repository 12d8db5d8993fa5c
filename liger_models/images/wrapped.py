"""Parts of a family's processor, wrapped: see processor.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from liger_models.images.spans import Span

BEGIN, END = "\U0010fffd", "\U0010fffc"  # private use area, not expected in text


def unmarking(processor: Any) -> Any:
    """Wrap the processor's tokenizer to remove markers."""
    processor.tokenizer = Unmarking(processor.tokenizer)
    return processor


def marked(text: str, spans: Sequence[Span]) -> str:
    pieces, last = [], 0
    for start, stop in spans:
        pieces += [text[last:start], BEGIN, text[start:stop], END]
        last = stop
    return "".join(pieces) + text[last:]


class Remembering:
    """An image processor that caches its last result: two answers to a prompt share the prompt's pictures."""

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.last: tuple[Any, Any, Any] = None, None, None  # a summary of the call, its pictures, its result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["image_processor"], name)

    def __call__(self, images: Any, **options: Any) -> Any:
        brief = _identities(images), repr(sorted(options.items(), key=lambda option: option[0]))
        if self.last[0] != brief:
            self.last = brief, images, self.image_processor(images, **options)
        return copy.copy(self.last[2])  # processors remove entries


def _identities(images: Any) -> Any:
    return [_identities(one) for one in images] if isinstance(images, list | tuple) else id(images)


class Unmarking:
    """A tokenizer that removes markers and records the spans between them and its tokens' characters."""

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


class Unused(dict[str, Any]):
    """In place of a video processor, while a processor of images alone is made: no setting is set."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
