"""Encoding of conversations with images to ids, loss marks and pixels, in worker processes if many."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.convert.host import cores
from liger_models.images import Preprocessor, Video, find_image
from liger_models.images.files import ImageSource, allow_pixels, most_pixels
from liger_models.images.processor import Shown
from liger_models.images.spans import Span
from liger_models.layers.vision.packing import OF_TOKENS
from liger_models.training.data.reading.records import Conversation, Record, check_text
from liger_models.training.data.reading.sources import Source
from liger_models.training.text.tokenizer import TextTokenizer

ALONE = 32  # fewer conversations are faster without worker processes
MOST_PROCESSES = 16
BOTH, FIRST, SECOND = "both.", "first.", "second."  # the conversation of an image


class Tokens(NamedTuple):
    """Encoded conversation: its ids, a trained byte for each, the number of ids that covers all images, and
    the answer text that the template dropped.
    """

    ids: list[int]
    trained: bytes
    needed: int
    dropped: list[str]


class Made(NamedTuple):
    """Encoded conversations of a record, and their images as safetensors (`join_images`)."""

    sequences: list[Tokens]
    images: bytes


class Rendered(NamedTuple):
    """Conversation rendered by the chat template (chat_template.Rendering), and its images."""

    text: str
    spans: list[Span]
    sources: list[ImageSource | Video]
    dropped: list[str]


class Work(NamedTuple):
    """Conversations of a record, to be encoded."""

    where: str
    rendered: list[Rendered]


class PicturedEncoder:
    """Encodes conversations in order; a context manager.

    Args:
        tokenizer: with the chat template.
        images: None for a text model.
    """

    def __init__(self, tokenizer: TextTokenizer, images: Preprocessor | None) -> None:
        self.tokenizer, self.images = tokenizer, images
        self.done = 0
        self.seen: dict[Path, dict[str, Any]] = {}
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> PicturedEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def files(self) -> list[dict[str, Any]]:
        """Identity of each image file, to detect changes."""
        return list(self.seen.values())

    def encode(self, records: list[tuple[Record, list[Conversation]]]) -> Iterator[Made]:
        """Encode records that have images in at least one conversation.

        Raises:
            DataError: an image cannot be read or does not fit its text, with file and line.
        """
        if records and self.images is None:
            raise DataError(
                f"{records[0][0].where}: the conversation has images, which this model does not accept; "
                "train one that does (`liger-models list`), without --text-only, from a checkpoint with "
                "its processor"
            )
        work = [self._work(*record) for record in records]
        workers = cores()
        alone = self.done < ALONE or workers == 1
        self.done += len(records)
        if alone:
            yield from (_made(self.images, one) for one in work)
            return
        if self.pool is None:
            # Neither torch's threads nor the tokenizer's survive a fork.
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(
                min(workers, MOST_PROCESSES),
                mp_context=context,
                initializer=_begin,
                initargs=(self.images, most_pixels()),
            )
        try:
            yield from self.pool.map(_made_there, work)
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that reads images ended ({error}) at {work[0].where} or soon after it; did the "
                "machine run out of memory?"
            ) from error

    def _work(self, record: Record, conversations: list[Conversation]) -> Work:
        try:
            return Work(record.where, [self._rendered(record, one) for one in conversations])
        except DataError as error:
            raise located(record.where, error) from error

    def _rendered(self, record: Record, conversation: Conversation) -> Rendered:
        rendering = self.tokenizer.render(conversation.messages, conversation.given, record.options)
        check_text(record.where, rendering.text)
        sources = [
            given.found(record.folder) if isinstance(given, Video) else find_image(given, record.folder)
            for given in conversation.images
        ]
        for found in sources:
            for source in found.frames if isinstance(found, Video) else [found]:
                if isinstance(source, Path) and source not in self.seen and source.is_file():
                    self.seen[source] = Source(str(source), source).identity()
        return Rendered(rendering.text, rendering.spans, sources, rendering.dropped)


def located(where: str, error: DataError) -> DataError:
    """Prefix an error with its location unless it has one."""
    return error if str(error).startswith(where) else DataError(f"{where}: {error}")


def join_images(images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the processed images of one or two conversations under prefixes; equal tensors appear once."""
    if len(images) == 1:
        return images[0]
    first, second = images
    alike = {name for name in first if name in second and torch.equal(first[name], second[name])}
    joined = {f"{BOTH}{name}": first[name] for name in alike}
    for prefix, own in ((FIRST, first), (SECOND, second)):
        joined |= {f"{prefix}{name}": x for name, x in own.items() if name not in alike}
    return joined


def part_images(joined: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Invert `join_images` for two conversations."""
    return [
        {name.partition(".")[2]: x for name, x in joined.items() if name.startswith((BOTH, own))}
        for own in (FIRST, SECOND)
    ]


def are_alike(names: Iterable[str]) -> bool:
    """Return whether two conversations have the same images, from the names of `join_images`."""
    return all(name.startswith(BOTH) or name.partition(".")[2] in OF_TOKENS for name in names)


def _made(images: Preprocessor | None, work: Work) -> Made:
    assert images is not None
    sequences, shown = [], []
    try:
        for one in work.rendered:
            found = images(one.text, one.spans, one.sources)
            sequences.append(_tokens(found, images.image_places(found.ids), one.dropped))
            shown.append(found.images)
    except DataError as error:
        raise located(work.where, error) from error
    return Made(sequences, save(join_images(shown)))


def _tokens(shown: Shown, places: Tensor, dropped: list[str]) -> Tokens:
    needed = 1 + int(places[-1]) if len(places) else 0
    if needed == len(shown.ids):
        raise DataError("nothing follows the last image, so that nothing is learned from it")
    trained = shown.trained.clone()
    trained[0] = False
    trained[places] = False
    return Tokens(shown.ids.tolist(), bytes(trained.tolist()), needed, dropped)


# State of a worker process.
_own: list[Preprocessor] = []


def _begin(images: Any, pixels: int | None) -> None:
    torch.set_num_threads(1)  # one process for each core
    allow_pixels(pixels)
    _own[:] = [images]


def _made_there(work: Work) -> Made:
    return _made(_own[0], work)
